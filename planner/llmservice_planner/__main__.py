"""`python -m llmservice_planner`: the `llmservice` command where its script is not on the PATH."""

from llmservice_planner.command import main

raise SystemExit(main())
