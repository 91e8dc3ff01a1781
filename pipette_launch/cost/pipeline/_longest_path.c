/* Longest paths through a schedule, action by action; the digits are those of Engine.ends_AR in engine.py.

   Letters as there: A = actions in the engine's own order, R = pipelines side by side. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

typedef int64_t Int;

/* Columns of Engine.table_A, then what lies on the way. */
enum { PREVIOUS, CAUSE, HOP, WAIT, DURATION, DURATIONS, HOPS, ENDS, DURATION_COUNTS, HOP_COUNTS, COUNT };

static void fill_ends(const Py_buffer *a, Int width)
{
    const Int *previous = a[PREVIOUS].buf, *cause = a[CAUSE].buf, *hop = a[HOP].buf, *wait = a[WAIT].buf;
    const Int *duration = a[DURATION].buf, actions = a[PREVIOUS].len / (Int)sizeof(Int);
    const double *durations = a[DURATIONS].buf, *hops = a[HOPS].buf;
    double *ends = a[ENDS].buf;
    for (Int i = 0; i < actions; i++) {
        const double *from = ends + cause[i] * width, *way = hops + hop[i] * width;
        const double *before = ends + previous[i] * width, *rest = hops + wait[i] * width;
        const double *takes = durations + duration[i] * width;
        double *end = ends + i * width;
        for (Int r = 0; r < width; r++) {
            const double ready = from[r] + way[r], idle = before[r] + rest[r];
            end[r] = (idle > ready ? idle : ready) + takes[r];
        }
    }
}

/* Walk back from the last end of one pipeline; the rank itself wins a tie. */
static void count_path(const Py_buffer *a, Int width, Int r)
{
    const Int *previous = a[PREVIOUS].buf, *cause = a[CAUSE].buf, *hop = a[HOP].buf, *wait = a[WAIT].buf;
    const Int *duration = a[DURATION].buf, nowhere = a[PREVIOUS].len / (Int)sizeof(Int);
    const double *hops = a[HOPS].buf, *ends = a[ENDS].buf;
    double *duration_counts = a[DURATION_COUNTS].buf, *hop_counts = a[HOP_COUNTS].buf;
    Int place = 0;
    for (Int i = 1; i < nowhere; i++)
        if (ends[i * width + r] > ends[place * width + r])
            place = i;
    while (place != nowhere) {
        duration_counts[duration[place] * width + r] += 1.0;
        const double ready = ends[cause[place] * width + r] + hops[hop[place] * width + r];
        const int waits = ready > ends[previous[place] * width + r] + hops[wait[place] * width + r];
        hop_counts[(waits ? hop[place] : wait[place]) * width + r] += 1.0;
        place = waits ? cause[place] : previous[place];
    }
}

static PyObject *finish(Py_buffer *a, int count)
{
    for (int i = 0; i < count; i++)
        PyBuffer_Release(&a[i]);
    Py_RETURN_NONE;
}

static PyObject *ends(PyObject *module, PyObject *args)
{
    Py_buffer a[COUNT];
    Py_ssize_t width;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*y*w*n", &a[0], &a[1], &a[2], &a[3], &a[4], &a[5], &a[6], &a[7], &width))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    fill_ends(a, width);
    Py_END_ALLOW_THREADS
    return finish(a, DURATION_COUNTS);
}

static PyObject *counts(PyObject *module, PyObject *args)
{
    Py_buffer a[COUNT];
    Py_ssize_t width;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*y*y*w*w*n", &a[0], &a[1], &a[2], &a[3], &a[4], &a[5], &a[6], &a[7], &a[8],
                          &a[9], &width))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (Int r = 0; r < width; r++)
        count_path(a, width, r);
    Py_END_ALLOW_THREADS
    return finish(a, COUNT);
}

static PyMethodDef methods[] = {{"ends", ends, METH_VARARGS, "Fill in when each action of each pipeline ends."},
                                {"counts", counts, METH_VARARGS, "Count what lies on the longest path of each pipeline."},
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_longest_path", NULL, -1, methods, NULL, NULL, NULL,
                                        NULL};

PyMODINIT_FUNC PyInit__longest_path(void)
{
    return PyModule_Create(&definition);
}
