"""placeholder for the registry"""
