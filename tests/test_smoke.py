from specd.client import Client


async def test_target_alone_and_speculative_agree(client: Client) -> None:
    texts = [
        "".join([r.text async for r in client.generate("def add(a, b):", max_tokens=32, num_draft_tokens=k)])
        for k in (0, 4)
    ]
    assert texts[0] == texts[1]
    assert texts[0]
