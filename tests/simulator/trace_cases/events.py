"""Cases: streams and events."""

from __future__ import annotations

from cuda.bindings import driver as cu

from .world import World, case, from_raw, isolated, need, raw


@case
def stream_create(w: World) -> object:
    made = [
        cu.cuStreamCreate(2),
        cu.cuStreamCreate(0),
        cu.cuStreamCreateWithPriority(1, 100),
        cu.cuStreamCreateWithPriority(1, -100),
    ]
    priorities = [int(need(cu.cuStreamGetPriority(answer[1]))) for answer in made[1:]]
    least, greatest = need(cu.cuCtxGetStreamPriorityRange())
    for answer in made[1:]:
        cu.cuStreamDestroy(answer[1])
    return [made, priorities, int(least), int(greatest)]


@case
def stream_defaults(w: World) -> object:
    return {
        "query_null": cu.cuStreamQuery(w.null),
        "query_legacy": cu.cuStreamQuery(cu.CUstream(1)),
        "query_thread": cu.cuStreamQuery(cu.CUstream(2)),
        "destroy_null": cu.cuStreamDestroy(w.null),
        "destroy_legacy": cu.cuStreamDestroy(cu.CUstream(1)),
        "flags": int(need(cu.cuStreamGetFlags(w.stream))),
        "wait_no_event": cu.cuStreamWaitEvent(w.stream, cu.CUevent(0), 0),
    }


@isolated
def stream_destroyed(w: World) -> object:
    stream = need(cu.cuStreamCreate(1))
    return [cu.cuStreamDestroy(stream), cu.cuStreamQuery(stream), cu.cuStreamDestroy(stream)]


@isolated
def stream_bogus(w: World) -> object:
    return cu.cuStreamQuery(cu.CUstream(0x7654320))


@case
def event_create(w: World) -> object:
    answers = [cu.cuEventCreate(flags) for flags in (8, 4, 5, 6, 7, 3, 1, 0)]
    for answer in answers:
        if answer[0] == cu.CUresult.CUDA_SUCCESS:
            cu.cuEventDestroy(answer[1])
    return answers


@case
def event_unrecorded(w: World) -> object:
    event, timed = w.event(), w.event(0)
    return {
        "query": cu.cuEventQuery(event),
        "sync": cu.cuEventSynchronize(event),
        "wait": cu.cuStreamWaitEvent(w.stream, event, 0),
        "elapsed_untimed": cu.cuEventElapsedTime(event, event),
        "elapsed": cu.cuEventElapsedTime(timed, timed),
    }


@case
def event_recorded(w: World) -> object:
    event, first, second = w.event(6), w.event(0), w.event(0)
    return {
        "record": cu.cuEventRecord(event, w.stream),
        "record_null": cu.cuEventRecord(first, w.null),
        "record_second": cu.cuEventRecord(second, w.null),
        "flags": cu.cuEventRecordWithFlags(event, w.stream, 2),
        "flag_external": cu.cuEventRecordWithFlags(event, w.stream, 1),
        "sync": cu.cuEventSynchronize(event),
        "query": cu.cuEventQuery(event),
        "wait_flags": cu.cuStreamWaitEvent(w.stream, event, 5),
        "wait": cu.cuStreamWaitEvent(w.stream, event, 0),
        "sync_second": cu.cuEventSynchronize(second),
        "elapsed_mixed": cu.cuEventElapsedTime(event, second),
        "elapsed": cu.cuEventElapsedTime(first, second),
        "record_no_event": cu.cuEventRecord(cu.CUevent(0), w.stream),
        "query_no_event": cu.cuEventQuery(cu.CUevent(0)),
        "destroy_no_event": cu.cuEventDestroy(cu.CUevent(0)),
    }


@isolated
def event_destroyed(w: World) -> object:
    event = need(cu.cuEventCreate(2))
    return [cu.cuEventDestroy(event), cu.cuEventQuery(event), cu.cuEventDestroy(event)]


@case
def event_handle(w: World) -> object:
    shared, local = w.event(6), w.event(2)
    handle = need(cu.cuIpcGetEventHandle(shared))
    again = need(cu.cuIpcGetEventHandle(shared))
    junk = from_raw(cu.CUipcEventHandle, bytes(range(64)))
    return {
        "local": cu.cuIpcGetEventHandle(local),
        "none": cu.cuIpcGetEventHandle(cu.CUevent(0)),
        "same_bytes": raw(handle) == raw(again),
        "open_self": cu.cuIpcOpenEventHandle(handle),
        "open_zero": cu.cuIpcOpenEventHandle(cu.CUipcEventHandle()),
        "open_junk": cu.cuIpcOpenEventHandle(junk),
    }


@case
def event_peer_unrecorded(w: World) -> object:
    return w.peer("event", raw(need(cu.cuIpcGetEventHandle(w.event(6)))).hex())


@case
def event_peer_recorded(w: World) -> object:
    event = w.event(6)
    need(cu.cuEventRecord(event, w.stream))
    need(cu.cuEventSynchronize(event))
    return w.peer("event", raw(need(cu.cuIpcGetEventHandle(event))).hex())


@case
def event_peer_stale(w: World) -> object:
    event = need(cu.cuEventCreate(6))
    data = raw(need(cu.cuIpcGetEventHandle(event)))
    need(cu.cuEventDestroy(event))
    return w.peer("event_open", data.hex())
