"""What the end-to-end tests share: a cluster, its objects, traffic that counts its failures."""
