"""Other projects' HTTP interfaces, which use only the port `api.service.NodeService`, and plug-ins that run
in trainers' processes.
"""
