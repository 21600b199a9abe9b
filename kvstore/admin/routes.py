"""The routes, one function each. They run on worker threads, but for the two that watch for life."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from kvstore.admin.documents import (
    Evicted,
    Known,
    Page,
    Pinned,
    Retained,
    Setting,
    State,
    StatusDocument,
)
from kvstore.admin.prefixes import locate, locate_retained
from kvstore.admin.problems import ProblemError
from kvstore.errors import UsageError
from kvstore.explain import Explanation
from kvstore.pool import Pool
from kvstore.stats import (
    DaemonStatus,
    LeaseStats,
    NamespaceStats,
    PinStats,
    TenantStats,
    TierStats,
    status_document,
)

T = TypeVar("T")
K = TypeVar("K", int, str)

router = APIRouter()


@dataclass
class Source:
    """What the routes show and change. Its functions may be called from any thread."""

    pool: Pool | None
    """None until the daemon has its memory: routes that need it answer 503 until it is set."""
    status: Callable[[], DaemonStatus]
    """Called only while there is a pool."""
    config: Callable[[], Mapping[str, Mapping[str, Any]]]
    """Settings by name, each ``{"value": …, "origin": …}``, without secrets."""
    registry: CollectorRegistry
    token: str | None
    """Secret that requests must show; None: only this machine is answered."""
    ready: Callable[[], tuple[bool, str]]
    """Whether clients are served, and the state in a word or sentence. Must not block."""


async def _source(request: Request) -> Source:
    source: Source = request.app.state.source
    return source


async def _pool(request: Request) -> Pool:
    pool: Pool | None = request.app.state.source.pool
    if pool is None:
        raise ProblemError(503, "not-ready", "the daemon is starting", headers={"Retry-After": "1"})
    return pool


async def _body(request: Request) -> AsyncIterator[bytearray]:
    async for body in request.app.state.bodies.read(request):
        yield body


TheSource = Annotated[Source, Depends(_source)]
ThePool = Annotated[Pool, Depends(_pool)]
Body = Annotated[bytearray, Depends(_body)]
Limit = Annotated[int, Query(ge=1, le=1000, description="Most items of one page.")]
After = Annotated[str, Query(max_length=256, description="`next` of the page before.")]
PinName = Annotated[str, Path(pattern=r"^[A-Za-z0-9._-]{1,128}$")]


# -- is it there -------------------------------------------------------------------------------------


@router.get("/healthz")
async def healthz() -> State:
    """Say that the process answers. Needs no token."""
    return State(state="alive")


@router.get("/readyz")
async def readyz(source: TheSource) -> State:
    """Say whether clients are served: 503 while the daemon starts or drains. Needs no token."""
    ready, state = source.ready()
    if not ready:
        raise ProblemError(503, "not-ready", f"the daemon is {state}", headers={"Retry-After": "1"})
    return State(state=state)


# -- what is there -----------------------------------------------------------------------------------


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def metrics(source: TheSource) -> Response:
    """Every metric, for Prometheus."""
    return Response(generate_latest(source.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.get("/v1/status")
def status(_pool: ThePool, source: TheSource) -> StatusDocument:
    """What the daemon is doing: identity, memory, sizes and counters."""
    return StatusDocument.model_validate(status_document(source.status()))


@router.get("/v1/config")
def config(source: TheSource) -> dict[str, Setting]:
    """Every setting, its value, and where that came from."""
    return {name: Setting(**setting) for name, setting in source.config().items()}


@router.get("/v1/tiers")
def tiers(pool: ThePool) -> Page[TierStats]:
    """All tiers and their sizes, fastest first."""
    return Page[TierStats](items=list(pool.stats().tiers), next=None)


@router.get("/v1/tenants")
def tenants(pool: ThePool) -> Page[TenantStats]:
    """Tenants with a ceiling or floor, by name, then the rest together: bytes of the last memory tier."""
    return Page[TenantStats](items=pool.tenants(), next=None)


@router.get("/v1/namespaces")
def namespaces(pool: ThePool, limit: Limit = 100, after: After = "") -> Page[NamespaceStats]:
    """Namespaces that have blocks, by digest."""
    return Page[NamespaceStats](**_page(pool.namespaces(), lambda item: item.digest, limit, after))


@router.get("/v1/leases")
def leases(
    pool: ThePool, limit: Limit = 100, after: Annotated[int, Query(ge=0)] = 0
) -> Page[LeaseStats]:
    """Leases and reservations held, by id: oldest first."""
    return Page[LeaseStats](**_page(pool.leases(), lambda item: item.id, limit, after))


@router.get("/v1/pins")
def pins(pool: ThePool, limit: Limit = 100, after: After = "") -> Page[PinStats]:
    """Pins, by name."""
    return Page[PinStats](**_page(pool.pins(), lambda item: item.name, limit, after))


# -- one prefix --------------------------------------------------------------------------------------


@router.post("/v1/prefixes:match")
def match(pool: ThePool, body: Body) -> Known:
    """How many leading tokens are stored. Changes nothing."""
    namespace, key = locate(pool, body)
    return Known(
        prompt_tokens=len(key) // namespace.key_bytes * namespace.layout.block_tokens
        if namespace.keys == "hash"
        else len(key) // 4,
        hit_tokens=pool.lookup(namespace, key),
    )


@router.post("/v1/prefixes:explain")
def explain(pool: ThePool, body: Body) -> Explanation:
    """Why each token hits or misses. Changes nothing."""
    return pool.explain(*locate(pool, body))


@router.post("/v1/prefixes:evict")
def evict(pool: ThePool, body: Body) -> Evicted:
    """Forget a prefix and everything that follows it; blocks in use stay readable for their holders."""
    return Evicted(num_blocks=pool.evict(*locate(pool, body)))


@router.post("/v1/prefixes:retain")
def retain(pool: ThePool, body: Body) -> Retained:
    """Raise the priority, or extend the life, of what is stored of a prefix."""
    namespace, key, priority, lifetime_s = locate_retained(pool, body)
    tokens = pool.retain(namespace, key, priority=priority, lifetime_s=lifetime_s)
    return Retained(tokens=tokens)


@router.put("/v1/pins/{name}")
def pin(pool: ThePool, name: PinName, body: Body) -> Pinned:
    """Hold the known blocks of a prefix against eviction; replaces the pin of this name."""
    namespace, key = locate(pool, body)
    try:
        tokens = pool.pin(name, namespace, key)
    except UsageError as error:
        raise ProblemError(409, "pin-budget", str(error)) from None
    if not tokens:
        raise ProblemError(
            404, "unknown-prefix", "no block of this prefix is stored: nothing is pinned"
        )
    return Pinned(name=name, tokens=tokens)


@router.delete("/v1/pins/{name}", status_code=204)
def unpin(pool: ThePool, name: PinName) -> None:
    """Give up a pin: its blocks can be evicted again."""
    if not pool.unpin(name):
        raise ProblemError(404, "unknown-pin", "no pin has this name: GET /v1/pins lists them")


def _page(items: Iterable[T], key: Callable[[T], K], limit: int, after: K) -> dict[str, Any]:
    """Return the fields of the page of the ``limit`` items whose keys follow ``after``."""
    rest = sorted((item for item in items if key(item) > after), key=key)
    page = rest[:limit]
    return {"items": page, "next": str(key(page[-1])) if len(rest) > limit else None}
