"""Hosts: the libraries that own arrays. `protocol` says what one offers."""
