"""The layouts that the writer can lay down."""
