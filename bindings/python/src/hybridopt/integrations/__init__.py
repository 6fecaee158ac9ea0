"""What other frameworks need beside the optimizer itself, one module a framework. Each imports its
framework, and nothing here is imported before it is asked for. docs/FRAMEWORKS.md says how to use them."""
