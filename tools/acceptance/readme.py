def write():
    return []
