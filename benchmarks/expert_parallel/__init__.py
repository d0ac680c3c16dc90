"""What an uneven load of the experts costs when data-parallel ranks share them."""
