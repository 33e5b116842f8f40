"""Photographs that come with scikit-image, with questions and answers written by looking at them.

All are CC0, public domain or free of known restrictions, as scikit-image states for each.
"""

from __future__ import annotations

from collections.abc import Mapping

QUESTIONS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "astronaut.png": (
        ("Who is in the picture?", "An astronaut."),
        ("What color is her suit?", "Orange."),
        ("What stands behind her on the right?", "A model of a space shuttle."),
        ("Which flag hangs on the left?", "The flag of the United States."),
    ),
    "brick.png": (
        ("What is this surface made of?", "Bricks."),
        ("What lies between the bricks?", "Pale mortar."),
        ("What shape are the bricks?", "Long rectangles."),
    ),
    "camera.png": (
        ("What is the man doing?", "He looks through a camera."),
        ("What does the camera stand on?", "A tripod."),
        ("What is the man wearing?", "A dark coat."),
        ("Is this photograph in color?", "No, it is black and white."),
    ),
    "chelsea.png": (
        ("Which animal is this?", "A cat."),
        ("What color are its eyes?", "Green."),
        ("What is its fur like?", "Ginger with dark stripes."),
    ),
    "coffee.png": (
        ("What is in the cup?", "Coffee."),
        ("What color is the saucer?", "Red."),
        ("What lies on the saucer?", "A spoon."),
        ("What is the table made of?", "Wood."),
    ),
    "coins.png": (
        ("What lies on the dark cloth?", "Old coins."),
        ("How many coins are there?", "Twenty-four."),
        ("In how many rows do they lie?", "Four."),
    ),
    "grass.png": (
        ("What grows here?", "Grass."),
        ("What lies between the blades?", "Fallen leaves."),
        ("Is this photograph in color?", "No, it is grey."),
    ),
    "gravel.png": (
        ("What covers the ground?", "Gravel."),
        ("Are the stones round or angular?", "Angular."),
        ("What color are the stones?", "Grey."),
    ),
    "hubble_deep_field.jpg": (
        ("What are the bright spots?", "Galaxies."),
        ("What color is the background?", "Black."),
        ("What took this picture?", "A space telescope."),
    ),
    "retina.jpg": (
        ("What does the picture show?", "The inside of an eye."),
        ("What color is it?", "Orange red."),
        ("What are the thin lines?", "Blood vessels."),
    ),
    "rocket.jpg": (
        ("What stands on the launch pad?", "A rocket."),
        ("What color is the rocket?", "White."),
        ("What time of day is it?", "Dusk."),
        ("What stands around it?", "Lattice towers."),
    ),
    "text.png": (
        ("What is on the paper?", "Formulas."),
        ("Are they printed or handwritten?", "Handwritten."),
        ("Is the paper seen from straight above?", "No, at an angle."),
    ),
}
"""File name -> pairs of question and answer."""
