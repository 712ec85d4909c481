"""Games that TextWorld generates."""
