"""Records out of text: what the model writes is JSON of a schema, whatever it would rather say.

Run it beside a server: `stemserve serve`, then `python examples/json_output.py`.
"""

import argparse
import asyncio
import json
import sys

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import Client, ClientError

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "nights", "breakfast"],
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "nights": {"type": "integer", "minimum": 1, "maximum": 30},
        "breakfast": {"type": "boolean"},
    },
}
EXAMPLE = """\
Mail: This is Peter Brown. A room for three nights, please, no breakfast.
JSON: {"name": "Peter Brown", "nights": 3, "breakfast": false}

Mail: Hello from Mia Berg! A night at yours, and breakfast would be lovely.
JSON: {"name": "Mia Berg", "nights": 1, "breakfast": true}
"""
MAILS = (
    "My name is Anna Lund, I would like to stay for 2 nights, with breakfast.",
    "I am Omar Haddad. Five nights, please. I do not want breakfast.",
    "Hi! Jan Kowalski here, we need a room for 7 nights, breakfast included.",
)


async def record(client: Client, mail: str) -> dict[str, object]:
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Context(text=f"{EXAMPLE}\nMail: {mail}\nJSON: "),
        json_schema=json.dumps(SCHEMA),
        sampling=inference_pb2.SamplingParams(temperature=0.0),
    )
    text = ""
    async for step in client.generate(request):
        text += "".join(news.text for news in step.news)
    found: dict[str, object] = json.loads(text)
    return found


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="127.0.0.1:50051", metavar="HOST:PORT")
    options = parser.parse_args()
    async with Client(options.server) as client:
        for found in await asyncio.gather(*(record(client, mail) for mail in MAILS)):
            print(found)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except (ClientError, ValueError) as error:  # no server, or an address that is none
        sys.exit(str(error))
