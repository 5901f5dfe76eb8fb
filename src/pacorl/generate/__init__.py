"""Making images: sets and edits, the best of several by a judge, storyboards.

    from pacorl import Generator
    from pacorl.records.compose import prompt_from
    from pacorl.generate.sets import generate_sets
    generator = Generator.from_pretrained("tiny")
    images = generate_sets(generator, [prompt_from("tiny", theme="a red hero with a crown in town", panels=[…])])
    images[0].image.save("set.png")

sets               `generate_sets`, and candidates by a judge
storyboard         characters, style and scenes in YAML → pages of panels
generated_images   PNGs with their recipe
repair             failing panels drawn again
"""
