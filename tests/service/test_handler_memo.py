"""Handlers of calls, wrapped once a method."""

from stemserve.service.serving.handler_memo import HandlerMemo


def test_a_handler_is_wrapped_once_and_a_new_one_anew() -> None:
    wrapped = list[tuple[str, object]]()

    def wrap(method: str, handler: object) -> object:
        wrapped.append((method, handler))
        return object()

    memo = HandlerMemo(wrap)
    first, second = object(), object()
    answers = [memo.wrapped("/a", first), memo.wrapped("/b", first), memo.wrapped("/a", first)]
    assert answers[0] is answers[2] is not answers[1]
    assert memo.wrapped("/a", second) is not answers[0]
    assert wrapped == [("/a", first), ("/b", first), ("/a", second)]
