"""`python -m llmservice_planner`: the `llmservice` command without its script."""

from llmservice_planner.command import main

raise SystemExit(main())
