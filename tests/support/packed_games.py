"""A packed release of generated games."""

import json
import lzma

from trial_envs.alfworld.generator import engine_texts


def pack_games(folder, games, split="train"):
    """A packed release of a few games, as the published one is made."""
    folder.mkdir()
    domain, grammar = engine_texts()
    sentence = '"Your task is to: UNKNOWN GOAL."'
    (folder / "domain.pddl").write_text(domain)
    (folder / "grammar.twl2.tmpl").write_text(grammar.replace(sentence, '"@@TASK@@"'))
    with lzma.open(folder / "games_all.jsonl.xz", "wt") as stream:
        for game in games:
            name, trial = game.task_id.split("/")
            task = game.text.grammar.split('"rhs": "Your task is to: ')[1].split('"')[0]
            row = {"split": split, "name": name, "trial": trial, "task": f"Your task is to: {task}"}
            row |= {"walkthrough": game.walkthrough, "pddl_problem": game.text.problem, "sha16": ""}
            stream.write(json.dumps(row) + "\n")
    return folder
