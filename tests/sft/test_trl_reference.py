"""TRL's ``SFTTrainer`` as the reference of fine-tuning: the same conversations give the same tokens, loss and gradient."""

import numpy as np
import pytest
from chat_tokenizers import published_tokenizer
from recorded_games import config_of, played, recorded
from small_learners import build_learner, gradients, update, worst

from trial_ray.models.loading import load_causal_lm
from trial_ray.models.tiny import build_tiny_model
from trial_ray.sft.messages import write_messages
from trial_ray.sft.sources import Dropped, load_episodes
from trial_ray.sft.training import SFTSettings, held_out_scores, learner_config
from trial_ray.trajectory import TrajectoryGroup

MASKED = -100


def batch_of_trl(messages, model_path, tokenizer, folder):
    """The trainer and its only batch; rows with generation masks, padded on the right."""
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    rows = load_dataset("json", data_files=str(messages), split="train", cache_dir=f"{folder}/cache")
    settings = SFTConfig(
        output_dir=str(folder), assistant_only_loss=True, max_length=None, per_device_train_batch_size=len(rows),
        use_cpu=True, bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    lm = load_causal_lm(model_path, "float32")
    trainer = SFTTrainer(lm, settings, train_dataset=rows, processing_class=tokenizer)
    return trainer, lm, *trainer.get_train_dataloader()


@pytest.mark.parametrize("style", ["conversation", pytest.param("tools", marks=pytest.mark.long)])
def test_loss_and_gradient_are_those_of_trl(style, tmp_path):
    """A response is trained up to its end token. TRL's template also trains the line break after it, which no policy samples."""
    tokenizer = published_tokenizer("qwen3")
    model_path = f"{tmp_path}/model"
    build_tiny_model(tokenizer, "nano").save_pretrained(model_path)
    tokenizer.save_pretrained(model_path)
    source = recorded(tmp_path / "recorded", style, played(style, tokenizer, number=1 if style == "tools" else 3))
    write_messages(source, messages := tmp_path / "messages.jsonl")
    trainer, lm, batch = batch_of_trl(messages, model_path, tokenizer, tmp_path)
    ids, labels = batch["input_ids"], batch["labels"]
    trained, ends = labels != MASKED, ids == tokenizer.eos_token_id
    after_end = trained & ends.roll(1, dims=1)
    assert after_end.sum() == (trained & ends).sum() > 0
    labels[after_end] = MASKED
    targets = labels[:, 1:]
    trained = targets != MASKED
    config = config_of(style).rl_module(model_path=model_path).training(grad_clip=None)
    config.env_runners(temperature=0.5)  # The temperature of rollouts must not change the loss.
    episodes = load_episodes(messages, config, tokenizer, Dropped(strict=True))
    learned = np.concatenate([turn.response_ids for each in episodes for turn in each.turns])
    assert sorted(learned) == sorted(targets[trained].tolist())

    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    learner = build_learner(learner_config(config, SFTSettings(batch_rows=12), updates=1))
    groups = [TrajectoryGroup(each.task_id, [each]) for each in episodes]
    assert worst(gradients(learner, groups), {name: parameter.grad for name, parameter in lm.named_parameters()}) < 1e-5
    predicted = lm(ids, batch["attention_mask"]).logits.argmax(-1)[:, :-1]
    accuracy = (predicted == targets)[trained].double().mean().item()
    assert held_out_scores(learner, episodes) == pytest.approx((loss.item(), accuracy), abs=1e-5)
    assert update(learner, groups)["grpo"]["surrogate_loss"].peek() == pytest.approx(loss.item(), abs=1e-5)
