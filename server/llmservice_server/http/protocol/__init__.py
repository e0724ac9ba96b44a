"""The API's bodies and answers, as pydantic models: FastAPI validates and documents them."""
