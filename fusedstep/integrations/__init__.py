"""Our optimizers in trainers that take them by code; most take a class or its path, see docs/recipes.

    hugging_face    the arguments of a Hugging Face Trainer as those of an optimizer; TRL's and PEFT's too
    axolotl         a plugin, for the list under `plugins:`
    ms_swift        names for `--optimizer`
    llama_factory   names for `optim_config`, in its version 1
    torchtitan      a container that knows our names

Each is imported by name, and imports its framework; `import fusedstep` imports none of them.
timm's registry is filled by `fusedstep.registry.register_with_timm`.
"""
