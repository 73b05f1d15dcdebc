"""How prompts are divided among steps changes nothing that comes of them."""

from __future__ import annotations

from tests.engine.engines import Driver, core, prompts
from tests.models.random_models import make_model


def test_the_division_of_prompts_changes_no_token(models_dir):
    model = make_model(models_dir, "llama")
    texts = prompts(400, (30, 70, 90, 33))

    def tokens(**options):
        driver = Driver(core(model, max_model_len=256, **options))
        driver.submit(0, texts[0], max_tokens=60, ignore_eos=True)
        for _ in range(5):
            driver.step()
        for number, text in enumerate(texts[1:], 1):
            driver.submit(number, text, max_tokens=20, ignore_eos=True)
        driver.run()
        return [driver.tokens(number) for number in range(len(texts))], driver.engine.stats.prefill_steps

    (whole, few), (divided, many) = tokens(max_step_ms=0), tokens(max_step_ms=1)
    assert divided == whole
    assert many > few
