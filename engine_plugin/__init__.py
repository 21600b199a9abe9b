"""What connects an inference engine to kvstore: layouts, attention and one module per engine.

Nothing is imported here: torch and the engines are loaded by the module that uses them. Plug-ins
talk to the store only through the public client interface of :mod:`kvstore`.
"""
