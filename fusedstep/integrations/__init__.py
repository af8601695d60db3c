"""Our optimizers in trainers that need code for it; most take a class or its path, see docs/recipes.

    hugging_face    turns arguments of a Hugging Face Trainer, or TRL's or PEFT's, into an optimizer's
    axolotl         a plugin, for the list under `plugins:`
    ms_swift        names for `--optimizer`
    llama_factory   names for `optim_config`, in its version 1
    torchtitan      a container that knows our names

Each is imported by name, and imports its framework; `import fusedstep` imports none of them.
timm's registry is filled by `fusedstep.registry.register_with_timm`.
"""
