"""Events of users with items: a store of columns, made of a user's file, and queries of it."""
