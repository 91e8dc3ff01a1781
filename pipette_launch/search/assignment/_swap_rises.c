/* Prices swaps of two seats one after the other; see SwapPrices.rises in swap_deltas.py for what the figures mean.

   Letters as there: Q = seats, D = the most flows of a seat, P = proposed swaps, G = groups, N = families. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

typedef int64_t Int;

/* One of the arrays handed over, in the order of the arguments. */
enum { SECONDS, OTHER, WEIGHT, MATRIX, GROUP, DEGREE, PLACE, BESIDE, NOW, ONE, TWO, SHARE, LOG_SHARE, FAMILY, ALONE,
       RISE, COUNT };

typedef struct {
    double *rise_G, *change_N;
    Int *touched_G, *touched_N;
    char *is_touched_G, *is_touched_N;
} Scratch;

/* Add what each flow of one seat takes longer on the place of its partner; return how many groups are touched. */
static Int add_seat(const Py_buffer *a, Int depth, Int seats, Int seat, Int partner, Scratch *s, Int touched)
{
    const float *seconds = a[SECONDS].buf, *weight = a[WEIGHT].buf, *now = a[NOW].buf;
    const Int *other = a[OTHER].buf, *matrix = a[MATRIX].buf, *group = a[GROUP].buf, *beside = a[BESIDE].buf;
    const Int here = ((const Int *)a[PLACE].buf)[seat], there = ((const Int *)a[PLACE].buf)[partner];
    const Int start = seat * depth, stop = start + ((const Int *)a[DEGREE].buf)[seat];
    for (Int i = start; i < stop; i++) {
        const int mutual = other[i] == partner;
        const Int at = matrix[i] + there * seats + (mutual ? here : beside[i]);
        const float rise = weight[i] * seconds[at] - now[i];
        const Int g = group[i];
        if (!s->is_touched_G[g]) {
            s->is_touched_G[g] = 1;
            s->rise_G[g] = 0.0;
            s->touched_G[touched++] = g;
        }
        s->rise_G[g] += mutual ? 0.5 * rise : rise;
    }
    return touched;
}

static double soft_rise(const Py_buffer *a, double softness, double steepest, double least, Scratch *s, Int touched)
{
    const double *share = a[SHARE].buf, *log_share = a[LOG_SHARE].buf;
    const Int *family = a[FAMILY].buf;
    const char *alone = a[ALONE].buf;
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
        s->change_N[n] += exp(fmin(s->rise_G[g] / softness + log_share[g], steepest)) - share[g];
    }
    for (Int i = 0; i < families; i++) {
        const Int n = s->touched_N[i];
        s->is_touched_N[n] = 0;
        total += softness * log1p(fmax(s->change_N[n], least - 1.0));
    }
    return total;
}

static void price(const Py_buffer *a, Int seats, Int depth, double softness, double steepest, double least, Scratch *s)
{
    const Int *one = a[ONE].buf, *two = a[TWO].buf;
    const Int swaps = a[ONE].len / (Int)sizeof(Int);
    for (Int p = 0; p < swaps; p++) {
        Int touched = add_seat(a, depth, seats, one[p], two[p], s, 0);
        touched = add_seat(a, depth, seats, two[p], one[p], s, touched);
        ((double *)a[RISE].buf)[p] = soft_rise(a, softness, steepest, least, s, touched);
    }
}

static PyObject *rises(PyObject *module, PyObject *args)
{
    Py_buffer a[COUNT];
    double softness, steepest, least;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*y*y*y*y*y*y*y*y*y*w*ddd", &a[0], &a[1], &a[2], &a[3], &a[4], &a[5], &a[6],
                          &a[7], &a[8], &a[9], &a[10], &a[11], &a[12], &a[13], &a[14], &a[15], &softness, &steepest,
                          &least))
        return NULL;
    const Int seats = a[PLACE].len / (Int)sizeof(Int), groups = a[SHARE].len / (Int)sizeof(double);
    const Int depth = seats ? a[OTHER].len / (Int)sizeof(Int) / seats : 0;
    Scratch s = {malloc((size_t)groups * 8), malloc((size_t)groups * 8), malloc((size_t)groups * 8),
                 malloc((size_t)groups * 8), calloc((size_t)groups, 1), calloc((size_t)groups, 1)};
    const int has_room = s.rise_G && s.change_N && s.touched_G && s.touched_N && s.is_touched_G && s.is_touched_N;
    if (has_room) {
        Py_BEGIN_ALLOW_THREADS
        price(a, seats, depth, softness, steepest, least, &s);
        Py_END_ALLOW_THREADS
    }
    free(s.rise_G), free(s.change_N), free(s.touched_G), free(s.touched_N), free(s.is_touched_G), free(s.is_touched_N);
    for (int i = 0; i < COUNT; i++)
        PyBuffer_Release(&a[i]);
    if (!has_room)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"rises", rises, METH_VARARGS, "Fill in by how much each swap raises the cost."},
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_swap_rises", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__swap_rises(void)
{
    return PyModule_Create(&definition);
}
