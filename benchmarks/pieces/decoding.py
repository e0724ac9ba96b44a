"""Getting an engine to where every one of its sequences decodes."""

from __future__ import annotations

from llmservice_server.engine.engine import Engine


def decode_together(engine: Engine, num_running: int) -> None:
    """Take steps until one is a token of each of `num_running` requests, which the engine has been given.

    Raises ValueError where one of them ends before: they would never all run.
    """
    while len(engine.last_plan.scheduled) < num_running or engine.last_plan.num_tokens > num_running:
        for output in engine.step().outputs:
            if output.finish_reason is not None:
                why = output.error or output.finish_reason
                raise ValueError(
                    f"request {output.request_id} ended before all {num_running} decoded ({why}): "
                    "let it have more tokens, and the engine room for them"
                )
