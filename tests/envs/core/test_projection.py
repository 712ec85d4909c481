from trial_envs.core.projection import Projection, project_action


def test_the_first_tags_and_the_reasoning_of_a_response_count():
    for response, action, valid in (
        ("<think>It is Here.</think>\n<action> Take Pencil 1 from Desk 1 </action>", "take pencil 1 from desk 1", True),
        ("<think>a</think><action>look</action> or <action>inventory</action>", "look", True),
        ("<think>a</think><action>go <action>look</action>", "go <action>look", True),
        ("<action>look</action>", "look", False),
        ("<think>x<action>look</action>", "look", False),
        ("x</think><action>look</action>", "look", False),
        ("</think><think><action>look</action>", "look", False),
        *((f"<think>{ideograph}</think><action>look</action>", "look", False) for ideograph in "看㐀豈\U00020000"),
    ):
        assert project_action(response) == Projection(action, valid)


def test_missing_action_tag_falls_back_to_the_tail():
    for broken in ("{}", "<action>{}", "{}</action>", "</action>{}<action>"):
        response = "<think>x</think>" + broken.format("I would rather GO TO the countertop 1 now")
        assert project_action(response, tail=20) == Projection(response.lower()[-20:], False)


def test_plain_response_is_the_action():
    assert project_action("  Go to desk 1\n", "plain") == Projection("Go to desk 1", True)
    assert project_action(" \n\t ", "plain") == Projection("", False)


def test_the_case_of_an_action_can_be_kept():
    for response, action in {
        "<think>x</think><ACTION> [Nf3] </Action>": "[Nf3]",
        "<think>İ</think><action>A C</action>": "A C",
        "no Tags": "no Tags",
    }.items():
        lowered = project_action(response)
        assert lowered.action == action.lower()
        assert project_action(response, keep_case=True) == Projection(action, lowered.valid)
