/* Tensors as Python objects: addresses and kinds of whole lists, in one call.
 *
 * A step has to notice that a tensor was replaced or moved.  In Python that costs 0.1 us per tensor, more than the
 * arithmetic of a small one.  DLPack's C exchange API (a stable table of functions that torch.Tensor publishes) gives
 * the address, dtype, shape and strides of a tensor object in a few nanoseconds, so nothing here knows torch's
 * headers.
 *
 * Objects arrive as their id(); the caller holds references to them.  cffi releases the GIL, so each function takes it.
 */
#include <Python.h>

#include "zk_api.h"

/* DLPack 1.x, as far as it is used here. */
typedef struct {
  int32_t type, id;
} dl_device;
typedef struct {
  uint8_t code, bits;
  uint16_t lanes;
} dl_dtype;
typedef struct {
  void *data;
  dl_device device;
  int32_t ndim;
  dl_dtype dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} dl_tensor;
typedef struct {
  uint32_t major, minor;
  void *previous;
  void *allocate, *managed_from_object, *managed_to_object;
  int (*read)(void *object, dl_tensor *out); /* a view without ownership; not 0 after an error */
} dl_exchange;
enum { DL_CPU = 1, DL_FLOAT = 2, DL_BFLOAT = 4 };

static const dl_exchange *exchange;
static PyTypeObject *tensor_type;
static PyObject *grad_name;

static PyObject *object_at(uint64_t id) { return (PyObject *)(uintptr_t)id; }

int zk_use_exchange(uint64_t table, uint64_t type) {
  const dl_exchange *found = (const dl_exchange *)(uintptr_t)table;
  if (!found || found->major != 1 || !found->read) return 0;
  PyGILState_STATE state = PyGILState_Ensure();
  tensor_type = (PyTypeObject *)object_at(type);
  grad_name = PyUnicode_InternFromString("grad");
  if (!grad_name) PyErr_Clear();
  exchange = grad_name ? found : 0;
  PyGILState_Release(state);
  return exchange != 0;
}

/* View a tensor object; 0 if it has no address (sparse, another library's subclass). */
static int view(PyObject *object, dl_tensor *out) {
  if (!exchange->read(object, out)) return 1;
  PyErr_Clear();
  return 0;
}

static uint64_t address_of(const dl_tensor *x) { return (uint64_t)(uintptr_t)x->data + x->byte_offset; }

/* Words that are recorded, or compared with recorded ones ------------------------------------------- */

typedef struct {
  uint64_t *words;
  int64_t capacity, used;
  int is_recording;
} tape;

/* Record a word, or compare it; 0 if it differs or there is no room. */
static int put(tape *t, uint64_t word) {
  if (t->used >= t->capacity) return 0;
  if (t->is_recording) t->words[t->used] = word;
  return t->words[t->used++] == word;
}

#define MOST_DEPTH 3 /* [[[parameter]], {parameter: {name: tensor}}] */

static int walk(tape *t, PyObject *object, int depth, int is_in_list) {
  if (PyObject_TypeCheck(object, tensor_type)) {
    dl_tensor x;
    return view(object, &x) && (!is_in_list || put(t, (uint64_t)(uintptr_t)object)) && put(t, address_of(&x));
  }
  if (depth > MOST_DEPTH) return 1;
  if (PyList_Check(object)) {
    Py_ssize_t length = PyList_Size(object);
    if (!put(t, (uint64_t)length)) return 0;
    for (Py_ssize_t i = 0; i < length; i++)
      if (!walk(t, PyList_GetItem(object, i), depth + 1, 1)) return 0;
  } else if (PyDict_Check(object)) {
    PyObject *key, *value;
    Py_ssize_t at = 0;
    if (!put(t, (uint64_t)(uintptr_t)object)) return 0;
    while (PyDict_Next(object, &at, &key, &value))
      if (!put(t, (uint64_t)(uintptr_t)key) || !walk(t, value, depth + 1, 0)) return 0;
  }
  return 1;
}

int zk_is_traced(uint64_t root, uint64_t *words, int64_t length) {
  tape t = {words, length, 0, 0};
  PyGILState_STATE state = PyGILState_Ensure();
  int is_same = walk(&t, object_at(root), 0, 1);
  PyGILState_Release(state);
  return is_same && t.used == length;
}

/* Gradients ----------------------------------------------------------------------------------------- */

/* The gradient of tensor `i` of a list: a new reference, or NULL after an error. */
static PyObject *grad_in(PyObject *list, Py_ssize_t i) {
  PyObject *tensor = PyList_GetItem(list, i);
  return tensor ? PyObject_GetAttr(tensor, grad_name) : 0;
}

/* The gradient of parameter `i`, or of the weight that mirrors it. */
static PyObject *grad_of(PyObject *params, PyObject *weights, Py_ssize_t i) {
  PyObject *grad = grad_in(params, i);
  if (grad != Py_None || weights == params) return grad;
  Py_DECREF(grad);
  return grad_in(weights, i);
}

/* Everything but the address: dtype, device, shape, strides. */
static int put_kind(tape *t, const dl_tensor *x) {
  uint64_t dtype = (uint64_t)x->dtype.code << 24 | (uint64_t)x->dtype.bits << 16 | x->dtype.lanes;
  int is_same = put(t, (uint64_t)x->ndim << 32 | dtype) && put(t, (uint64_t)x->device.type << 32 | (uint32_t)x->device.id);
  for (int32_t d = 0; is_same && d < x->ndim; d++)
    is_same = put(t, (uint64_t)x->shape[d]) && put(t, (uint64_t)x->strides[d]);
  return is_same;
}

static int read_grad(tape *kinds, PyObject *grad, uint64_t *address, int *is_moved) {
  dl_tensor x = {0};
  if (!grad) {
    PyErr_Clear();
    return 0;
  }
  int is_same = grad == Py_None ? put(kinds, UINT64_MAX) : view(grad, &x) && put_kind(kinds, &x);
  Py_DECREF(grad);
  *is_moved |= *address != address_of(&x);
  *address = address_of(&x);
  return is_same;
}

static int read_grads(tape *kinds, uint64_t params, uint64_t weights, uint64_t *addresses) {
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject *list = object_at(params);
  Py_ssize_t length = PyList_Size(list);
  int is_same = 1, is_moved = 0;
  for (Py_ssize_t i = 0; is_same && i < length; i++)
    is_same = read_grad(kinds, grad_of(list, object_at(weights), i), addresses + i, &is_moved);
  PyGILState_Release(state);
  return is_same ? is_moved : -1;
}

int64_t zk_record_grads(uint64_t params, uint64_t weights, uint64_t *kinds, int64_t capacity, uint64_t *addresses) {
  tape t = {kinds, capacity, 0, 1};
  return read_grads(&t, params, weights, addresses) < 0 ? -1 : t.used;
}

int zk_read_grads(uint64_t params, uint64_t weights, uint64_t *kinds, int64_t length, uint64_t *addresses) {
  tape t = {kinds, length, 0, 0};
  int result = read_grads(&t, params, weights, addresses);
  return t.used == length ? result : -1;
}

/* Words of memory ----------------------------------------------------------------------------------- */

/* The cheapest question: are the words that hold identities and addresses as they were?  The places of these words in
 * torch's and Python's objects are found by probing (probe.py).  Each place is inside an object that the words before
 * it prove alive, so the comparison stops at the first difference. */
static zk_places places;

void zk_use_places(const zk_places *found) { places = *found; }

typedef struct {
  uint64_t *at, *values;
  int64_t capacity, used;
} watch;

/* Watch the word at `address` and return it. */
static uint64_t add(watch *w, uint64_t address) {
  uint64_t value = *(const uint64_t *)(uintptr_t)address;
  if (w->used < w->capacity) {
    w->at[w->used] = address;
    w->values[w->used] = value;
  }
  w->used++;
  return value;
}

static void add_memory(watch *w, uint64_t impl) {
  uint64_t storage = add(w, impl + (uint64_t)places.storage);
  add(w, impl + (uint64_t)places.offset);
  if (storage) add(w, storage + (uint64_t)places.data);
}

static void add_object(watch *w, PyObject *object, int depth) {
  uint64_t address = (uint64_t)(uintptr_t)object;
  if (PyObject_TypeCheck(object, tensor_type)) {
    add_memory(w, add(w, address + (uint64_t)places.impl));
  } else if (depth <= MOST_DEPTH && PyList_Check(object)) {
    uint64_t length = add(w, address + (uint64_t)places.length), items = add(w, address + (uint64_t)places.items);
    for (uint64_t i = 0; i < length; i++) add_object(w, object_at(add(w, items + 8 * i)), depth + 1);
  } else if (depth <= MOST_DEPTH && PyDict_Check(object)) {
    PyObject *key, *value;
    Py_ssize_t at = 0;
    add(w, address + (uint64_t)places.version); /* another number after every change of the dict */
    while (PyDict_Next(object, &at, &key, &value)) add_object(w, value, depth + 1);
  }
}

/* Watch the gradient of a tensor with everything that describes it.  Returns 0 if it has none. */
static int add_grad(watch *w, PyObject *tensor) {
  uint64_t meta = add(w, add(w, (uint64_t)(uintptr_t)tensor + (uint64_t)places.impl) + (uint64_t)places.meta);
  uint64_t grad = meta ? add(w, meta + (uint64_t)places.grad) : places.no_grad;
  if (grad == places.no_grad) return 0;
  uint64_t storage = add(w, grad + (uint64_t)places.storage);
  for (int64_t k = places.storage + 8; k < places.impl_bytes; k += 8) add(w, grad + (uint64_t)k);
  if (storage) add(w, storage + (uint64_t)places.data);
  return 1;
}

int64_t zk_watch(uint64_t root, uint64_t *at, uint64_t *values, int64_t capacity) {
  watch w = {at, values, capacity, 0};
  PyGILState_STATE state = PyGILState_Ensure();
  add_object(&w, object_at(root), 0);
  PyGILState_Release(state);
  return w.used;
}

int64_t zk_watch_grads(uint64_t params, uint64_t weights, uint64_t *at, uint64_t *values, int64_t capacity) {
  watch w = {at, values, capacity, 0};
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject *list = object_at(params), *others = object_at(weights);
  for (Py_ssize_t i = 0; i < PyList_Size(list); i++)
    if (!add_grad(&w, PyList_GetItem(list, i)) && others != list) add_grad(&w, PyList_GetItem(others, i));
  PyGILState_Release(state);
  return w.used;
}

int zk_is_unchanged(const uint64_t *at, const uint64_t *values, int64_t length) {
  PyGILState_STATE state = PyGILState_Ensure(); /* no object is freed between a word and the one it leads to */
  int64_t i = 0;
  while (i < length && *(const uint64_t *)(uintptr_t)at[i] == values[i]) i++;
  PyGILState_Release(state);
  return i == length;
}

/* Rows for sums ------------------------------------------------------------------------------------- */

static int format_of(const dl_tensor *x) {
  if (x->dtype.code == DL_BFLOAT) return ZK_BF16;
  if (x->dtype.code != DL_FLOAT) return ZK_NONE;
  return x->dtype.bits == 32 ? ZK_F32 : x->dtype.bits == 16 ? ZK_F16 : ZK_NONE;
}

/* The number of elements; -1 if they are not contiguous. */
static int64_t contiguous_numel(const dl_tensor *x) {
  int64_t numel = 1, is_contiguous = 1;
  for (int32_t d = x->ndim - 1; d >= 0; d--) {
    is_contiguous &= x->shape[d] == 1 || x->strides[d] == numel;
    numel *= x->shape[d];
  }
  return is_contiguous || !numel ? numel : -1;
}

int zk_rows(uint64_t tensors, uint64_t *addresses, int64_t *numel) {
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject *list = object_at(tensors);
  Py_ssize_t length = PyList_Size(list);
  int format = ZK_NONE;
  for (Py_ssize_t i = 0; i < length; i++) {
    PyObject *object = PyList_GetItem(list, i);
    dl_tensor x;
    int fits = PyObject_TypeCheck(object, tensor_type) && view(object, &x) && x.device.type == DL_CPU;
    int found = fits ? format_of(&x) : ZK_NONE;
    format = i == 0 ? found : format;
    if (!fits || found != format || format == ZK_NONE || (numel[i] = contiguous_numel(&x)) < 0) {
      format = ZK_NONE;
      break;
    }
    addresses[i] = address_of(&x);
  }
  PyGILState_Release(state);
  return format;
}
