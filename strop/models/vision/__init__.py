"""Models that take images: their processors, the features of images in a pass, and positions with several
axes."""
