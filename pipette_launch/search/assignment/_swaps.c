/* Prices swaps of two seats, and makes those of a batch that gain; see descent.py for the figures.

   Letters as there: Q = seats, D = the most flows of a seat, P = proposed swaps, F = flows, G = groups, N = families,
   K = near places. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t Int;

/* The arrays handed over, in the order of the arguments: the tables of SwapPrices, then what a step has of its own. */
enum { SECONDS, OTHER, WEIGHT, MATRIX, GROUP, DEGREE, FAMILY, ALONE, PLACE, TABLES };
enum { SENDER = TABLES, RECEIVER, FLOW_MATRIX, FLOW_WEIGHT, FLOW_GROUP, FLOW_SECONDS, OFFSET, NEAR, DOMAIN, SEAT_CHANCE, ANY,
       FLOW_CHANCE, NEAR_CHANCE, SEAT, GROUP_SECONDS, STEP_COUNT };

#define INTS(a, name) ((const Int *)(a)[name].buf)
#define FLOATS(a, name) ((const double *)(a)[name].buf)
#define LENGTH(a, name) ((a)[name].len / 8)

typedef struct {
    double softness, steepest, least;
} Softness;

/* Of groups and families, to price swaps; the shares in the soft maxima are of this step. */
typedef struct {
    const double *share_G, *log_share_G;
    double *rise_G, *change_N;
    Int *touched_G, *touched_N;
    float *now_QD;
    char *is_touched_G, *is_touched_N;
} Scratch;

typedef struct {
    double rise;
    Int turn, one, two;
} Swap;

/* Add what each flow of one seat takes longer on the place of its partner; return how many groups are touched. */
static Int add_seat(const Py_buffer *a, Int seat, Int partner, Scratch *s, Int touched)
{
    const float *seconds = a[SECONDS].buf, *weight = a[WEIGHT].buf;
    const Int *other = INTS(a, OTHER), *matrix = INTS(a, MATRIX), *group = INTS(a, GROUP), *place = INTS(a, PLACE);
    const Int seats = LENGTH(a, PLACE), depth = LENGTH(a, OTHER) / seats;
    const Int here = place[seat], there = place[partner];
    const Int start = seat * depth, stop = start + INTS(a, DEGREE)[seat];
    for (Int i = start; i < stop; i++) {
        const int mutual = other[i] == partner;
        const Int beside = mutual ? here : place[other[i]], g = group[i];
        const float rise = weight[i] * seconds[matrix[i] + there * seats + beside] - s->now_QD[i];
        if (!s->is_touched_G[g]) {
            s->is_touched_G[g] = 1;
            s->rise_G[g] = 0.0;
            s->touched_G[touched++] = g;
        }
        s->rise_G[g] += mutual ? 0.5 * rise : rise;
    }
    return touched;
}

static double soft_rise(const Py_buffer *a, Softness soft, Scratch *s, Int touched)
{
    const Int *family = INTS(a, FAMILY);
    const char *alone = a[ALONE].buf;
    const double per_softness = 1.0 / soft.softness;
    double total = 0.0;
    Int families = 0;
    for (Int i = 0; i < touched; i++) {
        const Int g = s->touched_G[i], n = family[g];
        s->is_touched_G[g] = 0;
        if (alone[g]) {
            total += s->rise_G[g];
            continue;
        }
        if (!s->is_touched_N[n]) {
            s->is_touched_N[n] = 1;
            s->change_N[n] = 0.0;
            s->touched_N[families++] = n;
        }
        const double power = s->rise_G[g] * per_softness + s->log_share_G[g];
        s->change_N[n] += exp(power < soft.steepest ? power : soft.steepest) - s->share_G[g];
    }
    for (Int i = 0; i < families; i++) {
        const Int n = s->touched_N[i];
        s->is_touched_N[n] = 0;
        total += soft.softness * log1p(fmax(s->change_N[n], soft.least - 1.0));
    }
    return total;
}

static double rise_of(const Py_buffer *a, Int one, Int two, Softness soft, Scratch *s)
{
    const Int touched = add_seat(a, one, two, s, 0);
    return soft_rise(a, soft, s, add_seat(a, two, one, s, touched));
}

/* Scratch for all groups, of which there are no fewer than families; NULL where there is no memory. */
static char *scratch(const Py_buffer *a, Scratch *s)
{
    const Int groups = LENGTH(a, FAMILY), flows = LENGTH(a, OTHER);
    char *room = calloc(1, (size_t)groups * 34 + (size_t)flows * sizeof(float));
    if (!room)
        return NULL;
    s->rise_G = (double *)room, s->change_N = s->rise_G + groups;
    s->touched_G = (Int *)(s->change_N + groups), s->touched_N = s->touched_G + groups;
    s->now_QD = (float *)(s->touched_N + groups);
    s->is_touched_G = (char *)(s->now_QD + flows), s->is_touched_N = s->is_touched_G + groups;
    return room;
}

/* What each flow of each seat takes now. */
static void fill_now(const Py_buffer *a, float *now_QD)
{
    const float *seconds = a[SECONDS].buf, *weight = a[WEIGHT].buf;
    const Int *other = INTS(a, OTHER), *matrix = INTS(a, MATRIX), *place = INTS(a, PLACE);
    const Int seats = LENGTH(a, PLACE), depth = LENGTH(a, OTHER) / seats;
    for (Int q = 0; q < seats; q++)
        for (Int i = q * depth; i < q * depth + INTS(a, DEGREE)[q]; i++)
            now_QD[i] = weight[i] * seconds[matrix[i] + place[q] * seats + place[other[i]]];
}

static void release(Py_buffer *a, int count)
{
    for (int i = 0; i < count; i++)
        PyBuffer_Release(&a[i]);
}

/* Fill in the largest group of each family, and return their sum. */
static double largest(const Py_buffer *a, double *largest_N, Int families)
{
    const double *seconds = FLOATS(a, GROUP_SECONDS);
    double total = 0.0;
    for (Int n = 0; n < families; n++)
        largest_N[n] = -INFINITY;
    for (Int g = 0; g < LENGTH(a, FAMILY); g++)
        largest_N[INTS(a, FAMILY)[g]] = fmax(largest_N[INTS(a, FAMILY)[g]], seconds[g]);
    for (Int n = 0; n < families; n++)
        total += largest_N[n];
    return total;
}

/* Each group's share in its family's soft maximum, and the logarithm of it. */
static void fill_shares(const Py_buffer *a, Softness soft, double *share_G, double *log_share_G, double *of_N, Int families)
{
    const Int *family = INTS(a, FAMILY), groups = LENGTH(a, FAMILY);
    double *sum_N = of_N + families;
    largest(a, of_N, families);
    memset(sum_N, 0, (size_t)families * sizeof(double));
    for (Int g = 0; g < groups; g++) {
        share_G[g] = exp((FLOATS(a, GROUP_SECONDS)[g] - of_N[family[g]]) / soft.softness);
        sum_N[family[g]] += share_G[g];
    }
    for (Int g = 0; g < groups; g++) {
        share_G[g] /= sum_N[family[g]];
        log_share_G[g] = log(fmax(share_G[g], 1e-300));
    }
}

/* For each seat the sum of the weights of all seats up to it, by which chance draws the first seat of a swap. */
static void fill_levels(const Py_buffer *a, const double *share_G, double *level_Q, Int seats)
{
    double sum = 0.0, level = 0.0;
    memset(level_Q, 0, (size_t)seats * sizeof(double));
    for (Int f = 0; f < LENGTH(a, SENDER); f++) {
        const double share = share_G[INTS(a, FLOW_GROUP)[f]];
        level_Q[INTS(a, SENDER)[f]] += share;
        level_Q[INTS(a, RECEIVER)[f]] += share;
        sum += 2 * share;
    }
    for (Int q = 0; q < seats; q++)
        level_Q[q] = level += level_Q[q] + 1e-3 * sum / (double)seats;
}

/* The first seat of a proposed swap, and in `two` the second. */
static Int proposed(const Py_buffer *a, const double *level_Q, Int seats, Int p, Int num_informed, Int *two)
{
    const double wanted = FLOATS(a, SEAT_CHANCE)[p] * level_Q[seats - 1];
    Int low = 0, high = seats - 1;
    while (low < high) {
        const Int middle = (low + high) / 2;
        if (level_Q[middle] < wanted)
            low = middle + 1;
        else
            high = middle;
    }
    const Int depth = LENGTH(a, OTHER) / seats, near = LENGTH(a, NEAR) / seats, degree = INTS(a, DEGREE)[low];
    *two = INTS(a, ANY)[p];
    if (degree && p < num_informed) {
        const Int flow = (Int)(FLOATS(a, FLOW_CHANCE)[p] * (double)degree);
        const Int beside = INTS(a, PLACE)[INTS(a, OTHER)[low * depth + flow]];
        *two = INTS(a, SEAT)[INTS(a, NEAR)[beside * near + INTS(a, NEAR_CHANCE)[p]]];
    }
    return low;
}

static int by_rise(const void *one, const void *other)
{
    const Swap *a = one, *b = other;
    return a->rise != b->rise ? (a->rise > b->rise) - (a->rise < b->rise) : (a->turn > b->turn) - (a->turn < b->turn);
}

static Int fewest(Int one, Int other) { return one < other ? one : other; }

/* The first swap of a seat and of all seats that share a flow with it. */
static Int first_around(const Py_buffer *a, const Int *first_Q, Int depth, Int seat)
{
    Int first = first_Q[seat];
    for (Int i = seat * depth; i < seat * depth + INTS(a, DEGREE)[seat]; i++)
        first = fewest(first, first_Q[INTS(a, OTHER)[i]]);
    return first;
}

/* Make the swaps that come before all others on their seats and around them: none changes the price of another. */
static void make(const Py_buffer *a, const Swap *swaps, Int count, Int *first_Q, Int seats)
{
    Int *place = a[PLACE].buf, *seat = a[SEAT].buf;
    const Int depth = LENGTH(a, OTHER) / seats;
    for (Int q = 0; q < seats; q++)
        first_Q[q] = count;
    for (Int t = count - 1; t >= 0; t--)
        first_Q[swaps[t].one] = first_Q[swaps[t].two] = t;
    for (Int t = 0; t < count; t++) {
        const Int one = swaps[t].one, two = swaps[t].two;
        if (fewest(first_around(a, first_Q, depth, one), first_around(a, first_Q, depth, two)) < t)
            continue;
        const Int there = place[two];
        place[two] = place[one], place[one] = there;
        seat[place[one]] = one, seat[place[two]] = two;
    }
}

/* The seconds of each group, added up in the order of the flows. */
static void fill_group_seconds(const Py_buffer *a, Int seats)
{
    const Int *place = INTS(a, PLACE), groups = LENGTH(a, FAMILY);
    double *sum_G = a[GROUP_SECONDS].buf;
    memset(sum_G, 0, (size_t)groups * sizeof(double));
    for (Int f = 0; f < LENGTH(a, SENDER); f++) {
        const Int at = place[INTS(a, SENDER)[f]] * seats + place[INTS(a, RECEIVER)[f]];
        sum_G[INTS(a, FLOW_GROUP)[f]] += FLOATS(a, FLOW_WEIGHT)[f] * FLOATS(a, FLOW_SECONDS)[INTS(a, FLOW_MATRIX)[f] + at];
    }
    for (Int g = 0; g < groups; g++)
        sum_G[g] = FLOATS(a, OFFSET)[g] + sum_G[g];
}

static Int stepped(const Py_buffer *a, Softness soft, Int num_informed, Int families, Scratch *s, char *room, double *cost)
{
    const Int seats = LENGTH(a, PLACE), groups = LENGTH(a, FAMILY), proposals = LENGTH(a, ANY);
    Swap *swaps = (Swap *)room;
    double *share_G = (double *)(swaps + proposals), *log_share_G = share_G + groups;
    double *of_N = log_share_G + groups, *level_Q = of_N + 2 * families;
    const Int *domain = INTS(a, DOMAIN), has_domains = LENGTH(a, DOMAIN);
    Int count = 0;
    fill_now(a, s->now_QD);
    fill_shares(a, soft, share_G, log_share_G, of_N, families);
    s->share_G = share_G, s->log_share_G = log_share_G;
    fill_levels(a, share_G, level_Q, seats);
    for (Int p = 0; p < proposals; p++) {
        Swap swap = {0.0, p, 0, 0};
        swap.one = proposed(a, level_Q, seats, p, num_informed, &swap.two);
        if (swap.one == swap.two ||
            (has_domains && domain[INTS(a, PLACE)[swap.one]] != domain[INTS(a, PLACE)[swap.two]]))
            continue;
        swap.rise = rise_of(a, swap.one, swap.two, soft, s);
        if (swap.rise < 0.0)
            swaps[count++] = swap;
    }
    if (count) {
        qsort(swaps, (size_t)count, sizeof(Swap), by_rise);
        make(a, swaps, count, (Int *)(level_Q + seats), seats);
        fill_group_seconds(a, seats);
    }
    *cost = largest(a, of_N, families);
    return count;
}

static PyObject *step(PyObject *module, PyObject *args)
{
    Py_buffer a[STEP_COUNT];
    Softness soft;
    Scratch s;
    Py_ssize_t num_informed, families, found = 0;
    double cost = 0.0;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*y*y*w*y*y*y*y*y*y*y*y*y*y*y*y*y*w*w*dddnn", &a[0], &a[1], &a[2], &a[3], &a[4],
                          &a[5], &a[6], &a[7], &a[8], &a[9], &a[10], &a[11], &a[12], &a[13], &a[14], &a[15], &a[16],
                          &a[17], &a[18], &a[19], &a[20], &a[21], &a[22], &a[23], &soft.softness, &soft.steepest,
                          &soft.least, &num_informed, &families))
        return NULL;
    char *of_groups = scratch(a, &s);
    char *room = malloc((size_t)LENGTH(a, ANY) * sizeof(Swap) +
                        8 * (size_t)(2 * LENGTH(a, FAMILY) + 2 * families + 2 * LENGTH(a, PLACE)));
    const int has_room = of_groups && room;
    if (has_room) {
        Py_BEGIN_ALLOW_THREADS
        found = stepped(a, soft, num_informed, families, &s, room, &cost);
        Py_END_ALLOW_THREADS
    }
    free(of_groups), free(room);
    release(a, STEP_COUNT);
    return has_room ? Py_BuildValue("nd", found, cost) : PyErr_NoMemory();
}

static PyMethodDef methods[] = {{"step", step, METH_VARARGS, "Make swaps that gain; return how many gain, and the cost."},
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_swaps", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__swaps(void)
{
    return PyModule_Create(&definition);
}
