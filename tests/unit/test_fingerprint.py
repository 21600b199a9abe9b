"""Equal weights give equal digests wherever they lie; whatever changes them changes the digest."""

from __future__ import annotations

import copy
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine_plugin.fingerprint import Fingerprint, settings_digest
from kvstore.errors import UsageError


def llama(seed: int = 0, **changes) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes | {"num_attention_heads": 2, "num_key_value_heads": 1} | changes)
    return LlamaForCausalLM(config).eval()


class Lora(nn.Module):
    """An adapter as PEFT writes it: weights in parameters, everything else in attributes."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        torch.manual_seed(5)
        self.lora_A = nn.ParameterDict({n: torch.randn(2, base.in_features) for n in "ab"})
        self.lora_B = nn.ParameterDict({n: torch.randn(base.out_features, 2) for n in "ab"})
        self.scaling = {"a": 1.0, "b": 1.0}
        self._active_adapter = ["a"]
        self._disable_adapters = False
        self.merged_adapters: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base_layer(x)
        for name in () if self._disable_adapters else self._active_adapter:
            y = y + self.scaling[name] * (x @ self.lora_A[name].T @ self.lora_B[name].T)
        return y


def add_lora(model: LlamaForCausalLM) -> Lora:
    attention = model.model.layers[0].self_attn
    attention.q_proj = Lora(attention.q_proj)
    return attention.q_proj


def weight(model: LlamaForCausalLM) -> nn.Parameter:
    return model.model.layers[1].mlp.down_proj.weight


def in_place(model):
    with torch.no_grad():
        weight(model)[3, 5] += 1e-3


def through_data(model):
    weight(model).data.mul_(1.001)


def data_copied(model):
    weight(model).data.copy_(torch.randn_like(weight(model)))


def data_replaced(model):
    weight(model).data = weight(model).data.clone() + 1


def load_state(model):
    model.load_state_dict(llama(seed=1).state_dict())


def parameter_replaced(model):
    layer = model.model.layers[0].self_attn
    layer.k_proj.weight = nn.Parameter(layer.k_proj.weight.detach() * 2)


def optimiser_step(model):
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def to_another_dtype(model):
    model.bfloat16()


def buffer_changed(model):
    model.model.rotary_emb.inv_freq.mul_(2)


def layer_removed(model):
    del model.model.layers[1]


def activation_replaced(model):
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def last_value(model):
    model.model.embed_tokens.weight.data[-1, -1] += 1


def number_changed(model):
    model.model.layers[0].self_attn.scaling *= 3


def flag_added(model):
    model.model.layers[0].self_attn.use_something = True


def number_made_an_array(model):
    model.model.layers[0].input_layernorm.variance_epsilon = torch.ones(2)


def dictionary_replaced(model):
    layers = model.model.layers
    layers._modules = {"0": layers[1], "1": layers[0]}


class Elsewhere(nn.SiLU):
    pass


Elsewhere.__qualname__ = "SiLUActivation"


def another_class_of_the_same_name(model):
    assert type(model.model.layers[0].mlp.act_fn).__qualname__ == "SiLUActivation"
    model.model.layers[0].mlp.act_fn = Elsewhere()


CHANGES = [
    in_place,
    through_data,
    data_copied,
    data_replaced,
    load_state,
    parameter_replaced,
    optimiser_step,
    to_another_dtype,
    buffer_changed,
    layer_removed,
    activation_replaced,
    last_value,
    number_changed,
    flag_added,
    number_made_an_array,
    dictionary_replaced,
    another_class_of_the_same_name,
    add_lora,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_is_noticed_and_equals_a_fresh_look(change):
    model = llama()
    fingerprint = Fingerprint(model)
    before = fingerprint.digest()
    assert fingerprint.digest() == before
    change(model)
    after = fingerprint.digest()
    assert after != before
    assert after == Fingerprint(model).digest() == fingerprint.digest()


def switch(lora):
    lora._active_adapter = ["b"]


def switch_in_place(lora):
    lora._active_adapter[0] = "b"


def both(lora):
    lora._active_adapter.append("b")


def scale(lora):
    lora.scaling["a"] = 0.5


def disable(lora):
    lora._disable_adapters = True


def merge(lora):
    lora.merged_adapters.append("a")


def new_weights_under_the_same_name(lora):
    with torch.no_grad():
        lora.lora_A["a"].add_(1)


ADAPTER_CHANGES = [
    switch,
    switch_in_place,
    both,
    scale,
    disable,
    merge,
    new_weights_under_the_same_name,
]


@pytest.mark.parametrize("change", ADAPTER_CHANGES, ids=lambda change: change.__name__)
def test_adapter_state_is_part_of_the_digest(change):
    model = llama()
    lora = add_lora(model)
    fingerprint = Fingerprint(model)
    before = fingerprint.digest()
    change(lora)
    after = fingerprint.digest()
    assert after != before
    assert after == Fingerprint(model).digest()


def test_switching_back_gives_the_old_digest():
    model = llama()
    lora = add_lora(model)
    fingerprint = Fingerprint(model)
    digests = []
    for active in ("a", "b", "a", "b"):
        lora._active_adapter = [active]
        digests.append(fingerprint.digest())
    assert digests[:2] == digests[2:]
    assert digests[0] != digests[1]


def test_directory_and_name_do_not_matter(tmp_path):
    model = llama()
    loaded = []
    for name in ("some/where", "else"):
        model.save_pretrained(tmp_path / name)
        loaded.append(AutoModelForCausalLM.from_pretrained(tmp_path / name).eval())
    assert loaded[0].config.name_or_path != loaded[1].config.name_or_path
    digests = {Fingerprint(each).digest() for each in (model, *loaded)}
    assert len(digests) == 1
    assert len({settings_digest(each.config.to_dict()) for each in (model, *loaded)}) == 1


def test_a_moved_copy_of_the_weights_is_the_same_model():
    model = llama()
    fingerprint = Fingerprint(model)
    before = fingerprint.digest()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert fingerprint.digest() == before
    assert Fingerprint(copy.deepcopy(model)).digest() == before


def test_running_the_model_changes_nothing():
    model = llama()
    fingerprint = Fingerprint(model)
    before = fingerprint.digest()
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False)
    assert fingerprint.digest() == before


def test_refresh_sees_what_leaves_no_sign():
    model = llama()
    fingerprint = Fingerprint(model)
    before = fingerprint.digest()
    weight(model).data.view(-1)[9] += 1  # between the sampled values
    assert fingerprint.digest() == before
    assert fingerprint.refresh() != before


def test_nan_weights_do_not_look_changed_every_time(monkeypatch):
    model = llama()
    with torch.no_grad():
        weight(model).fill_(torch.nan)
    fingerprint = Fingerprint(model)
    monkeypatch.setattr(fingerprint, "_look", lambda: pytest.fail("hashed again"))
    assert fingerprint.digest() == fingerprint.digest()


def test_tensors_of_every_size_and_type():
    model = nn.Module()
    for index, dtype in enumerate((torch.bool, torch.int8, torch.float16, torch.float64)):
        for count in (0, 1, 3, 5, 70):
            model.register_buffer(f"b{index}_{count}", torch.ones(count).to(dtype))
    model.register_buffer("scalar", torch.tensor(3.0))
    model.register_buffer("transposed", torch.arange(6.0).view(2, 3).T)
    fingerprint = Fingerprint(model)
    before = fingerprint.digest()
    for buffer in model.buffers():
        if buffer.numel() and buffer.is_contiguous():
            buffer.data.zero_()
            assert fingerprint.digest() != before
            buffer.data.fill_(3 if buffer is model.scalar else 1)
            assert fingerprint.digest() == before


def test_weights_that_cannot_be_read_are_refused():
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(UsageError, match="bytes of bias cannot be read"):
        Fingerprint(model)


def test_foreign_hooks_are_seen_and_recording_ones_ignored():
    model = llama()
    fingerprint = Fingerprint(model)
    model(input_ids=torch.tensor([[1, 2]]), output_hidden_states=True)  # installs Transformers' own
    assert not fingerprint.has_hooks()
    handle = model.model.layers[0].register_forward_hook(lambda module, args, output: output)
    assert fingerprint.has_hooks()
    handle.remove()
    assert not fingerprint.has_hooks()


def hook_with_a_module(model):
    layer = copy.deepcopy(model.model.layers[0].mlp)
    model.model.layers[0].mlp = layer
    return layer.register_forward_hook(lambda module, args, output: output * 2)


def hook_in_another_dictionary(model):
    model.model.layers[0]._forward_pre_hooks = OrderedDict()
    return model.model.layers[0].register_forward_pre_hook(lambda module, args: args)


def hook_of_all_modules(model):
    return nn.modules.module.register_module_forward_hook(lambda module, args, output: None)


def pre_hook_of_all_modules(model):
    return nn.modules.module.register_module_forward_pre_hook(lambda module, args: None)


def forward_replaced(model):
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x) * 2
    return SimpleNamespace(remove=lambda: delattr(mlp, "forward"))


FOREIGN = [
    hook_with_a_module,
    hook_in_another_dictionary,
    hook_of_all_modules,
    pre_hook_of_all_modules,
    forward_replaced,
]


@pytest.mark.parametrize("enter", FOREIGN, ids=lambda enter: enter.__name__)
def test_foreign_code_is_seen_wherever_it_enters(enter):
    model = llama()
    fingerprint = Fingerprint(model)
    handle = enter(model)
    fingerprint.digest()
    assert fingerprint.has_hooks()
    handle.remove()
    fingerprint.digest()
    assert not fingerprint.has_hooks()


def test_the_structure_is_all_but_values_and_adapters():
    model = llama()
    lora = add_lora(model)
    fingerprint = Fingerprint(model)
    before = fingerprint.structure
    for change in (in_place, load_state_of_itself, lambda _: scale(lora), lambda _: merge(lora)):
        change(model)
        fingerprint.digest()
        assert fingerprint.structure == before
    for change in (to_another_dtype, layer_removed, flag_added):
        before = fingerprint.structure
        change(model)
        fingerprint.digest()
        assert fingerprint.structure != before


def load_state_of_itself(model):
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def test_settings_that_change_keys_and_values_count_and_others_do_not():
    config = LlamaConfig(num_hidden_layers=2).to_dict()
    base = settings_digest(config)
    names = {"_name_or_path": "x", "transformers_version": "0", "dtype": "bfloat16", "use_cache": 0}
    assert settings_digest(config | names) == base
    for change in ({"rms_norm_eps": 1e-3}, {"rope_parameters": {"rope_theta": 5e5}}, {"new": 1}):
        assert settings_digest(config | change) != base
