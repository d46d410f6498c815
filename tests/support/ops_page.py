from docs.site.ops_page import GROUPS  # noqa: F401
