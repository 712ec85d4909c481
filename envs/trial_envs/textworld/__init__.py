"""Environment of games that TextWorld generates."""
