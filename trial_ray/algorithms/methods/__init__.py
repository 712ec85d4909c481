"""The methods, one file each: the file's name is the method's, and its ``CONFIG`` the method's config class."""
