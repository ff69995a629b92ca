"""A model's step on a CPU as one native call. The sources in `src` know nothing of Python or torch; `build` compiles
them, once for each instruction set, `library` loads what this processor has, and `tape` records a model."""
