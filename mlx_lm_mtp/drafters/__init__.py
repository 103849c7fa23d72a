"""What proposes tokens: the contract, and the drafters that come with the package."""
