/*
 * Happens-before: vector clocks, and the accesses that no order separates.
 *
 * Everything is known when an operation is enqueued: what its stream, the legacy stream, events and
 * the host put before it. So accesses are compared at that moment, and a missing wait is found
 * whatever the timing of the run. The host is one participant: its threads are taken to order
 * themselves.
 */
#include "cuda_state.h"

#include <stdio.h>

vector_clock host_clock;

static unsigned long long component_ticks[COMPONENTS];
static int components_given;

static unsigned long long race_count;
static char last_race[512];
static bool abort_on_race;

void clock_join(vector_clock *clock, const vector_clock *other)
{
    for (int i = 0; i < COMPONENTS; i++)
        if (clock->tick[i] < other->tick[i])
            clock->tick[i] = other->tick[i];
}

/* Streams that share a component are ordered too often, never too seldom: no false alarm. */
int component_new(void)
{
    return components_given++ % COMPONENTS;
}

unsigned long long component_tick(int component)
{
    return ++component_ticks[component];
}

__attribute__((constructor)) static void read_mode(void)
{
    const char *mode = getenv("PYCOMM_DOUBLE_RACES");
    abort_on_race = mode && strcmp(mode, "abort") == 0;
}

static void report(const access_entry *earlier, const access_by *by, uintptr_t begin,
                   uintptr_t end, bool writes)
{
    race_count++;
    snprintf(last_race, sizeof last_race,
             "%s on stream %d %s [%#lx, %#lx), which %s on stream %d %s, and nothing orders them",
             by->name, by->stream, writes ? "writes" : "reads",
             begin > earlier->begin ? begin : earlier->begin,
             end < earlier->end ? end : earlier->end, earlier->name, earlier->stream,
             earlier->writes ? "writes" : "reads");
    if (abort_on_race) {
        fprintf(stderr, "double: race: %s\n", last_race);
        abort();
    }
}

static void append(access_list *list, const access_entry *entry)
{
    if (list->count == list->room) {
        list->room = list->room ? 2 * list->room : 8;
        list->entries = must_grow(list->entries, list->room * sizeof *list->entries);
    }
    list->entries[list->count++] = *entry;
}

/* Keeps of an earlier access what lies outside of the new one. */
static void cut(access_list *list, size_t index, uintptr_t begin, uintptr_t end)
{
    access_entry old = list->entries[index];
    list->entries[index] = list->entries[--list->count];
    access_entry part = old;
    if (old.begin < begin) {
        part.end = begin;
        append(list, &part);
    }
    if (old.end > end) {
        part = old;
        part.begin = end;
        append(list, &part);
    }
}

void note_access(const access_by *by, uintptr_t begin, size_t bytes, bool writes)
{
    allocation *of = allocation_at(begin);
    uintptr_t end = begin + bytes;
    if (!of || bytes == 0) /* pageable memory: the host uses it unseen anyway */
        return;
    access_list *list = &of->accesses;
    bool reported = false;
    for (size_t i = list->count; i-- > 0;) {
        access_entry *earlier = &list->entries[i];
        if (earlier->begin >= end || earlier->end <= begin)
            continue;
        bool ordered = by->clock->tick[earlier->component] >= earlier->tick;
        if (!ordered && (writes || earlier->writes) && !reported) {
            report(earlier, by, begin, end, writes);
            reported = true; /* one for an access, however many pieces it meets */
        }
        /* A write stands for all before it, a read for the reads that came before it. */
        if (writes || (ordered && !earlier->writes))
            cut(list, i, begin, end);
    }
    access_entry entry = {begin, end, writes, by->component, by->clock->tick[by->component],
                          by->stream, ""};
    snprintf(entry.name, sizeof entry.name, "%s", by->name);
    append(list, &entry);
}

unsigned long long double_races(void)
{
    pthread_mutex_lock(&state_lock);
    unsigned long long count = race_count;
    pthread_mutex_unlock(&state_lock);
    return count;
}

const char *double_last_race(void)
{
    static _Thread_local char text[sizeof last_race];
    pthread_mutex_lock(&state_lock);
    memcpy(text, last_race, sizeof text);
    pthread_mutex_unlock(&state_lock);
    return text;
}

void double_reset_races(void)
{
    pthread_mutex_lock(&state_lock);
    race_count = 0;
    last_race[0] = '\0';
    pthread_mutex_unlock(&state_lock);
}
