"""What lies in a ``.pt2`` file, and how a package that AOTInductor compiled is run."""
