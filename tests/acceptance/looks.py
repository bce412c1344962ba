"""What tests look at to see whether all is at rest: tables and queues, not the code that was running."""

from celery_lifecycle import Lifecycle


def left_over(lifecycle: Lifecycle) -> list[object]:
    """The objects that are not at rest, or that are remembered without a reason."""
    return [
        (state, lifecycle.store.jobs.list(state.ref, None))
        for state in lifecycle.store.objects.find_many(limit=1000)
        if state.token
        or state.dispatch
        or state.wake_at is not None
        or not (state.sealed or state.stored or state.lines)
    ]


def waiting_messages(lifecycle: Lifecycle) -> int:
    """How many messages are in the application's queue, by the broker's own count."""
    with lifecycle.app.connection_for_read() as connection:
        queue = lifecycle.app.conf.task_default_queue
        try:
            return int(connection.default_channel.queue_declare(queue, passive=True).message_count)
        except connection.channel_errors:  # Redis has no empty queues
            return 0
