"""Lightning strategies of the collection, imported as ``lit_llm.strategies``."""

if __name__ != "lit_llm.strategies":
    raise ImportError(f"import lit_llm.strategies, not {__name__}: a class must not exist under two names")
