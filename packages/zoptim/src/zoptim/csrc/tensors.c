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
static PyObject *grad_name, *grad_of_tensors; /* "grad", and what torch.Tensor has under that name */

static PyObject *object_at(uint64_t id) { return (PyObject *)(uintptr_t)id; }

int zk_use_exchange(uint64_t table, uint64_t type) {
  const dl_exchange *found = (const dl_exchange *)(uintptr_t)table;
  if (!found || found->major != 1 || !found->read) return 0;
  PyGILState_STATE state = PyGILState_Ensure();
  tensor_type = (PyTypeObject *)object_at(type);
  grad_name = PyUnicode_InternFromString("grad");
  grad_of_tensors = grad_name ? PyObject_GetAttr(object_at(type), grad_name) : 0;
  PyErr_Clear();
  exchange = grad_of_tensors ? found : 0;
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
  PyObject *held; /* a list that keeps alive what is recorded; NULL: compare */
} tape;

/* Record a word, or compare it; 0 if it differs or there is none to compare with. */
static int put(tape *t, uint64_t word) {
  int64_t at = t->used++;
  if (at >= t->capacity) return t->held != 0;
  if (t->held) t->words[at] = word;
  return t->words[at] == word;
}

/* Everything but the address: dtype, device, shape, strides. */
static int put_kind(tape *t, const dl_tensor *x) {
  uint64_t dtype = (uint64_t)x->dtype.code << 24 | (uint64_t)x->dtype.bits << 16 | x->dtype.lanes;
  int is_same = put(t, (uint64_t)x->ndim << 32 | dtype) && put(t, (uint64_t)x->device.type << 32 | (uint32_t)x->device.id);
  for (int32_t d = 0; is_same && d < x->ndim; d++)
    is_same = put(t, (uint64_t)x->shape[d]) && put(t, (uint64_t)x->strides[d]);
  return is_same;
}

static int put_object(tape *t, PyObject *object) {
  if (t->held && PyList_Append(t->held, object)) PyErr_Clear();
  return put(t, (uint64_t)(uintptr_t)object);
}

#define MOST_DEPTH 3 /* [[[parameter]], {parameter: {name: tensor}}] */

static int walk(tape *t, PyObject *object, int depth) {
  if (PyObject_TypeCheck(object, tensor_type)) {
    dl_tensor x;
    return view(object, &x) && put_object(t, object) && put(t, address_of(&x)) && put_kind(t, &x);
  }
  if (depth > MOST_DEPTH) return 1;
  if (PyList_Check(object)) {
    Py_ssize_t length = PyList_Size(object);
    if (!put(t, (uint64_t)length)) return 0;
    for (Py_ssize_t i = 0; i < length; i++)
      if (!walk(t, PyList_GetItem(object, i), depth + 1)) return 0;
  } else if (PyDict_Check(object)) {
    PyObject *key, *value;
    Py_ssize_t at = 0;
    if (!put_object(t, object)) return 0;
    while (PyDict_Next(object, &at, &key, &value))
      if (!put_object(t, key) || !walk(t, value, depth + 1)) return 0;
  }
  return 1;
}

int64_t zk_trace(uint64_t root, uint64_t held, uint64_t *words, int64_t capacity) {
  tape t = {words, capacity, 0, object_at(held)};
  PyGILState_STATE state = PyGILState_Ensure();
  int is_whole = walk(&t, object_at(root), 0);
  PyGILState_Release(state);
  return is_whole ? t.used : -1;
}

int zk_is_traced(uint64_t root, uint64_t *words, int64_t length) {
  tape t = {words, length, 0, 0};
  PyGILState_STATE state = PyGILState_Ensure();
  int is_same = walk(&t, object_at(root), 0);
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
  tape t = {kinds, capacity, 0, object_at(params)};
  return read_grads(&t, params, weights, addresses) < 0 || t.used > capacity ? -1 : t.used;
}

int zk_read_grads(uint64_t params, uint64_t weights, uint64_t *kinds, int64_t length, uint64_t *addresses) {
  tape t = {kinds, length, 0, 0};
  int result = read_grads(&t, params, weights, addresses);
  return t.used == length ? result : -1;
}

/* Words of memory ----------------------------------------------------------------------------------- */

/* The cheapest question: are the words that describe tensors as they were?  The places of these words in torch's and
 * Python's objects are found by probing (probe.py).  Each place is inside an object that the words before it prove
 * alive, so a comparison stops at the first difference. */
static zk_places places;

#define KIND_WORDS 14 /* dims, five sizes, five strides, offset, numel, dtype and device */
enum { AT_DIMS = 0, AT_SIZES = 1, AT_STRIDES = 6, AT_OFFSET = 11, AT_NUMEL = 12, AT_DTYPE = 13, MOST_DIM = 5 };
#define DTYPE_BITS 0xffffffffffu /* of its word: dtype and device; above are flags, and bits that nothing sets */

void zk_use_places(const zk_places *found) { places = *found; }

static const uint64_t *words_at(uint64_t address, int64_t place) {
  return (const uint64_t *)(uintptr_t)(address + (uint64_t)place);
}
static uint64_t word_at(uint64_t address, int64_t place) { return *words_at(address, place); }

/* What is watched is a tape of records: a tag, and words.  Lists come before what is in them. */
enum { A_TENSOR = 1, A_LIST = 2, A_DICT = 3, A_VERSION = 4 };
enum { TENSOR_WORDS = 6 };

typedef struct {
  uint64_t *words;
  int64_t capacity, used;
  int is_watchable; /* no tensor has more dims than lie in its own words */
} watch;

static void note(watch *w, uint64_t word) {
  if (w->used < w->capacity) w->words[w->used] = word;
  w->used++;
}

/* One word for dims, sizes, strides, offset, dtype and device. */
static uint64_t hash_of_kind(uint64_t impl) {
  const uint64_t *kind = words_at(impl, places.kind);
  uint64_t sum = kind[AT_DIMS] * 0x9e3779b97f4a7c15u + kind[AT_OFFSET] * 0xc2b2ae3d27d4eb4fu +
                 (kind[AT_DTYPE] & DTYPE_BITS) * 0x165667b19e3779f9u;
  uint64_t dims = kind[AT_DIMS] < MOST_DIM ? kind[AT_DIMS] : MOST_DIM, odd = 0xd6e8feb86659fd93u;
  for (uint64_t d = 0; d < dims; d++, odd += 0xa0761d6478bd642eu)
    sum += kind[AT_SIZES + d] * odd + kind[AT_STRIDES + d] * (odd ^ 0xe7037ed1a0b428dau);
  return sum;
}

static void note_tensor(watch *w, uint64_t object) {
  const uint64_t impl = word_at(object, places.impl), storage = word_at(impl, places.storage);
  note(w, A_TENSOR), note(w, object), note(w, impl), note(w, storage), note(w, hash_of_kind(impl));
  note(w, storage ? word_at(storage, places.data) : 0);
  w->is_watchable &= words_at(impl, places.kind)[AT_DIMS] <= MOST_DIM;
}

static int is_same_tensor(const uint64_t *words) {
  return word_at(words[0], places.impl) == words[1] && word_at(words[1], places.storage) == words[2] &&
         hash_of_kind(words[1]) == words[3] && (!words[2] || word_at(words[2], places.data) == words[4]);
}

static void note_object(watch *w, PyObject *object, int depth);

static void note_list(watch *w, PyObject *list, int depth) {
  uint64_t address = (uint64_t)(uintptr_t)list, length = word_at(address, places.length);
  note(w, A_LIST), note(w, address), note(w, length), note(w, word_at(address, places.items));
  for (uint64_t i = 0; i < length; i++) note(w, (uint64_t)(uintptr_t)PyList_GetItem(list, (Py_ssize_t)i));
  for (uint64_t i = 0; i < length; i++) note_object(w, PyList_GetItem(list, (Py_ssize_t)i), depth + 1);
}

static int is_same_list(const uint64_t *words) {
  if (word_at(words[0], places.length) != words[1] || word_at(words[0], places.items) != words[2]) return 0;
  const uint64_t *items = words_at(words[2], 0);
  uint64_t differs = 0;
  for (uint64_t i = 0; i < words[1]; i++) differs |= items[i] ^ words[3 + i];
  return !differs;
}

static void note_dict(watch *w, PyObject *dict, int depth) {
  PyObject *key, *value;
  Py_ssize_t at = 0;
  uint64_t address = (uint64_t)(uintptr_t)dict;
  if (places.version) { /* another number after every change of the dict */
    note(w, A_VERSION), note(w, address), note(w, word_at(address, places.version));
  } else {
    note(w, A_DICT), note(w, address), note(w, (uint64_t)PyDict_Size(dict));
    while (PyDict_Next(dict, &at, &key, &value))
      note(w, (uint64_t)(uintptr_t)key), note(w, (uint64_t)(uintptr_t)value);
  }
  for (at = 0; PyDict_Next(dict, &at, &key, &value);) note_object(w, value, depth + 1);
}

static int is_same_dict(const uint64_t *words) {
  PyObject *key, *value;
  Py_ssize_t at = 0;
  if ((uint64_t)PyDict_Size(object_at(words[0])) != words[1]) return 0;
  for (const uint64_t *pair = words + 2; PyDict_Next(object_at(words[0]), &at, &key, &value); pair += 2)
    if (pair[0] != (uint64_t)(uintptr_t)key || pair[1] != (uint64_t)(uintptr_t)value) return 0;
  return 1;
}

static void note_object(watch *w, PyObject *object, int depth) {
  if (PyObject_TypeCheck(object, tensor_type))
    note_tensor(w, (uint64_t)(uintptr_t)object);
  else if (depth <= MOST_DEPTH && PyList_Check(object))
    note_list(w, object, depth);
  else if (depth <= MOST_DEPTH && PyDict_Check(object))
    note_dict(w, object, depth);
}

int64_t zk_watch(uint64_t root, uint64_t *words, int64_t capacity) {
  watch w = {words, capacity, 0, 1};
  PyGILState_STATE state = PyGILState_Ensure();
  note_object(&w, object_at(root), 0);
  PyGILState_Release(state);
  return w.is_watchable ? w.used : 0;
}

int zk_is_unchanged(const uint64_t *words, int64_t length) {
  PyGILState_STATE state = PyGILState_Ensure(); /* no object is freed between a word and the one it leads to */
  const uint64_t *at = words, *end = words + length;
  int is_same = 1;
  while (is_same && at < end) {
    const uint64_t *record = at + 1;
    switch (*at) {
      case A_TENSOR: is_same = is_same_tensor(record), at += TENSOR_WORDS; break;
      case A_LIST: is_same = is_same_list(record), at += 4 + record[1]; break;
      case A_DICT: is_same = is_same_dict(record), at += 3 + 2 * record[1]; break;
      default: is_same = word_at(record[0], places.version) == record[1], at += 3;
    }
  }
  PyGILState_Release(state);
  return is_same;
}

/* Gradients by words: a row for each parameter, the size of an element (0 without a gradient) and its kind. */
enum { ROW_WORDS = 1 + KIND_WORDS };

/* The implementation of the gradient of a tensor object; 0 if it has none. */
static uint64_t grad_impl_of(PyObject *tensor) {
  uint64_t meta = word_at(word_at((uint64_t)(uintptr_t)tensor, places.impl), places.meta);
  uint64_t grad = meta ? word_at(meta, places.grad) : places.no_grad;
  return grad == places.no_grad ? 0 : grad;
}

static uint64_t grad_impl_in(PyObject *params, PyObject *weights, Py_ssize_t i) {
  uint64_t grad = grad_impl_of(PyList_GetItem(params, i));
  return grad || weights == params ? grad : grad_impl_of(PyList_GetItem(weights, i));
}

/* The address of the first element of an implementation; 0 if it has no memory. */
static uint64_t address_in(uint64_t impl, uint64_t item_bytes) {
  const uint64_t *kind = words_at(impl, places.kind), storage = word_at(impl, places.storage);
  const uint64_t data = storage && kind[AT_NUMEL] ? word_at(storage, places.data) : 0;
  return data ? data + kind[AT_OFFSET] * item_bytes : 0;
}

/* Compare a gradient with its row.  Its offset may be another one. */
static int is_same_grad(const uint64_t *row, uint64_t impl, uint64_t *address) {
  if (!impl || !row[0]) return *address = 0, !impl && !row[0];
  const uint64_t *kind = words_at(impl, places.kind);
  uint64_t differs = 0;
  for (int k = 0; k < AT_OFFSET; k++) differs |= kind[k] ^ row[1 + k];
  differs |= kind[AT_NUMEL] ^ row[1 + AT_NUMEL];
  differs |= (kind[AT_DTYPE] ^ row[1 + AT_DTYPE]) & DTYPE_BITS;
  *address = address_in(impl, row[0]);
  return !differs && (*address || !kind[AT_NUMEL]);
}

/* Whether the words show what `tensor.grad` is: its class has no `grad` of its own.  `*type` was found to have none. */
static int is_plain(PyObject *tensor, PyTypeObject **type) {
  if (Py_TYPE(tensor) == *type) return 1;
  PyObject *found = PyObject_GetAttr((PyObject *)Py_TYPE(tensor), grad_name);
  int is_inherited = found == grad_of_tensors && PyObject_TypeCheck(tensor, tensor_type);
  Py_XDECREF(found);
  PyErr_Clear();
  if (is_inherited) *type = Py_TYPE(tensor);
  return is_inherited;
}

static int are_plain(PyObject *params, PyObject *weights) {
  PyTypeObject *type = 0;
  for (Py_ssize_t i = 0; i < PyList_Size(params); i++)
    if (!is_plain(PyList_GetItem(params, i), &type) || !is_plain(PyList_GetItem(weights, i), &type)) return 0;
  return 1;
}

static int note_grad(uint64_t *row, PyObject *params, PyObject *weights, Py_ssize_t i) {
  dl_tensor x;
  uint64_t impl = grad_impl_in(params, weights, i);
  row[0] = 0;
  if (!impl) return 1;
  PyObject *grad = grad_of(params, weights, i);
  if (!grad) PyErr_Clear();
  int is_same = grad && word_at((uint64_t)(uintptr_t)grad, places.impl) == impl && view(grad, &x);
  Py_XDECREF(grad);
  const uint64_t *kind = words_at(impl, places.kind);
  if (!is_same || kind[AT_DIMS] > MOST_DIM) return 0;
  row[0] = (uint64_t)x.dtype.bits / 8 * x.dtype.lanes;
  for (int k = 0; k < KIND_WORDS; k++) row[1 + k] = kind[k];
  return row[0] && address_in(impl, row[0]) == (kind[AT_NUMEL] ? address_of(&x) : 0);
}

int zk_note_grads(uint64_t params, uint64_t weights, uint64_t *rows) {
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject *list = object_at(params);
  Py_ssize_t length = PyList_Size(list);
  int is_known = are_plain(list, object_at(weights));
  for (Py_ssize_t i = 0; is_known && i < length; i++)
    is_known = note_grad(rows + ROW_WORDS * i, list, object_at(weights), i);
  PyGILState_Release(state);
  return is_known;
}

int zk_read_noted(uint64_t params, uint64_t weights, const uint64_t *rows, uint64_t *addresses) {
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject *list = object_at(params), *others = object_at(weights);
  Py_ssize_t length = PyList_Size(list);
  int is_same = 1, is_moved = 0;
  for (Py_ssize_t i = 0; is_same && i < length; i++) {
    uint64_t address;
    is_same = is_same_grad(rows + ROW_WORDS * i, grad_impl_in(list, others, i), &address);
    if (is_same) is_moved |= addresses[i] != address, addresses[i] = address;
  }
  PyGILState_Release(state);
  return is_same ? is_moved : -1;
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

/* What the last view of a tensor has shown; tensors whose words show the same need none. */
typedef struct {
  uint64_t dtype, item_bytes;
  int format;
} seen;

/* The number of elements of an implementation; -1 if it is of another dtype, or not contiguous. */
static int64_t numel_by_words(const seen *last, uint64_t impl, uint64_t *address) {
  const uint64_t *kind = words_at(impl, places.kind);
  if (((kind[AT_DTYPE] ^ last->dtype) & DTYPE_BITS) || kind[AT_DIMS] > MOST_DIM) return -1;
  if (!(*address = address_in(impl, last->item_bytes))) return -1;
  uint64_t numel = 1, is_contiguous = 1;
  for (uint64_t d = kind[AT_DIMS]; d-- > 0;) {
    is_contiguous &= kind[AT_SIZES + d] == 1 || kind[AT_STRIDES + d] == numel;
    numel *= kind[AT_SIZES + d];
  }
  return is_contiguous ? (int64_t)numel : -1;
}

static int64_t numel_by_view(seen *last, PyObject *object, uint64_t *address) {
  dl_tensor x;
  if (!PyObject_TypeCheck(object, tensor_type) || !view(object, &x) || x.device.type != DL_CPU) return -1;
  const int format = format_of(&x);
  if (format == ZK_NONE || (last->format != ZK_NONE && format != last->format)) return -1;
  const uint64_t impl = places.impl ? word_at((uint64_t)(uintptr_t)object, places.impl) : 0;
  *last = (seen){impl ? words_at(impl, places.kind)[AT_DTYPE] : 0, x.dtype.bits / 8, format};
  *address = address_of(&x);
  return contiguous_numel(&x);
}

int64_t zk_rows(uint64_t tensors, uint64_t *addresses, int64_t *numel, int *format) {
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject *list = object_at(tensors);
  Py_ssize_t length = PyList_Size(list);
  seen last = {0, 0, ZK_NONE};
  int64_t used = 0;
  for (Py_ssize_t i = 0; used >= 0 && i < length; i++) {
    PyObject *object = PyList_GetItem(list, i);
    if (object == Py_None) continue;
    const int is_known = last.dtype && PyObject_TypeCheck(object, tensor_type);
    int64_t found = is_known ? numel_by_words(&last, word_at((uint64_t)(uintptr_t)object, places.impl), addresses + used) : -1;
    if (found < 0) found = numel_by_view(&last, object, addresses + used);
    numel[used] = found;
    used = found < 0 ? -1 : used + 1;
  }
  PyGILState_Release(state);
  *format = last.format;
  return used;
}

int64_t zk_grad_rows(uint64_t params, uint64_t weights, uint64_t *addresses, int64_t *numel, int *format) {
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject *list = object_at(params), *others = object_at(weights);
  Py_ssize_t length = PyList_Size(list);
  seen last = {0, 0, *format};
  int64_t used = places.impl && are_plain(list, others) ? 0 : -1;
  for (Py_ssize_t i = 0; used >= 0 && i < length; i++) {
    uint64_t impl = grad_impl_in(list, others, i);
    if (!impl) continue;
    int64_t found = last.dtype ? numel_by_words(&last, impl, addresses + used) : -1;
    if (found < 0) {
      PyObject *grad = grad_of(list, others, i);
      found = grad ? numel_by_view(&last, grad, addresses + used) : -1;
      Py_XDECREF(grad);
      PyErr_Clear();
    }
    numel[used] = found;
    used = found < 0 ? -1 : used + 1;
  }
  PyGILState_Release(state);
  *format = last.format;
  return used;
}
