"""What two or more stages share: parameters, the contract, artifact formats, servers, tracking."""
