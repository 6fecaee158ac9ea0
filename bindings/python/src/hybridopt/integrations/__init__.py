"""What other frameworks need in addition to the optimizer, one module for each framework. Each module imports its
framework, and is imported only when it is used. docs/FRAMEWORKS.md says how to use them."""
