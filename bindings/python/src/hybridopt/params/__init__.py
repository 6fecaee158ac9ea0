"""The params of a torch optimizer, as the library knows them."""
