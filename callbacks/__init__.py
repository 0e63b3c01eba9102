"""Lightning callbacks of the collection, imported as ``lit_llm.callbacks``."""

if __name__ != "lit_llm.callbacks":
    raise ImportError(f"import lit_llm.callbacks, not {__name__}: a class must not exist under two names")

from lit_llm.callbacks.run_summary import RunSummary

__all__ = ["RunSummary"]
