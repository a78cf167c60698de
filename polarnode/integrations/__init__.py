"""Other projects' HTTP interfaces, each on the port `api.service.Service` alone."""
