"""Communicators that can be broken from outside and rebuilt in place, under the same objects."""
