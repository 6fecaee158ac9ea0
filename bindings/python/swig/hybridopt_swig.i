// hybridopt_swig: the C ABI in Python, made by SWIG from offload.h as it is shipped.
//
// - Handles, streams and memory are integers (None is NULL): what array.buffer_info() or
//   torch.Tensor.data_ptr() gives.
// - Structs come all zero with struct_size set. They hold no reference to what they point to: keep
//   arrays alive for as long as the header says.
// - What a function returns through a pointer, it returns; a status that is not OK raises Error
//   with the text of offload_last_error. The interpreter lock is released in every call.
%module(threads="1") hybridopt_swig

%{
#include <stdlib.h>

#include "offload.h"
%}

// Text fields belong to the structs; a copy of a text that is set again is not freed.
#pragma SWIG nowarn=451

%include <carrays.i>
%include <cstring.i>
%include <stdint.i>

// ------------------------------------------------------------------------------------ addresses

%define ADDRESS(type...)
%typemap(in) type {
  $1 = $input == Py_None ? NULL : ($1_ltype)PyLong_AsVoidPtr($input);
  if (PyErr_Occurred()) SWIG_fail;
}
%typemap(out) type %{ $result = PyLong_FromVoidPtr((void*)$1); %}
%enddef

ADDRESS(void*)
ADDRESS(const void*)
ADDRESS(float*)
ADDRESS(const float*)
ADDRESS(offload_context_t)
ADDRESS(offload_optimizer_t)
ADDRESS(offload_stash_t)
ADDRESS(offload_exchange_t)
ADDRESS(offload_stream_t)

// RETURNED(declaration, type, expression): an argument that the function writes is a result instead.
%define RETURNED(declaration, type, convert)
%typemap(in, numinputs=0) declaration (type returned) {
  returned = 0;
  $1 = &returned;
}
%typemap(argout) declaration {
  $result = SWIG_Python_AppendOutput($result, convert);
}
%enddef

RETURNED(offload_context_t* context, offload_context_t, PyLong_FromVoidPtr(returned$argnum))
RETURNED(offload_optimizer_t* optimizer, offload_optimizer_t, PyLong_FromVoidPtr(returned$argnum))
RETURNED(offload_stash_t* stash, offload_stash_t, PyLong_FromVoidPtr(returned$argnum))
RETURNED(offload_exchange_t* exchange, offload_exchange_t, PyLong_FromVoidPtr(returned$argnum))
RETURNED(offload_stream_t* stream, offload_stream_t, PyLong_FromVoidPtr(returned$argnum))
RETURNED(void** data, void*, PyLong_FromVoidPtr(returned$argnum))
RETURNED(void** mapped, void*, PyLong_FromVoidPtr(returned$argnum))
RETURNED(int32_t* rank, int32_t, PyLong_FromLong(returned$argnum))
RETURNED(uint32_t* group_id, uint32_t, PyLong_FromUnsignedLong(returned$argnum))
RETURNED(uint32_t* first_id, uint32_t, PyLong_FromUnsignedLong(returned$argnum))
RETURNED(offload_ticket_t* ticket, offload_ticket_t, PyLong_FromUnsignedLongLong(returned$argnum))
RETURNED(offload_stash_ticket_t* ticket, offload_stash_ticket_t,
         PyLong_FromUnsignedLongLong(returned$argnum))
RETURNED(uint64_t* hash, uint64_t, PyLong_FromUnsignedLongLong(returned$argnum))
RETURNED(offload_stash_mark_t* mark, offload_stash_mark_t,
         PyLong_FromUnsignedLongLong(returned$argnum))

// The caller says how many bytes to make room for.
%cstring_output_maxsize(char* path, uint64_t path_bytes);

// ------------------------------------------------------------------------------------ callables

%{
// Calls a Python function from whatever thread; its exceptions end here, as the header wants.
static void call_python(void* function, const char* format, ...) {
  const PyGILState_STATE state = PyGILState_Ensure();
  va_list values;
  va_start(values, format);
  PyObject* arguments = Py_VaBuildValue(format, values);
  va_end(values);
  PyObject* result = arguments ? PyObject_CallObject(function, arguments) : NULL;
  if (result == NULL) PyErr_WriteUnraisable(function);
  Py_XDECREF(result);
  Py_XDECREF(arguments);
  PyGILState_Release(state);
}

static void call_log(void* user, int32_t level, const char* text) {
  call_python(user, "(is)", (int)level, text);
}

static void call_progress(void* user, uint64_t done, uint64_t total) {
  call_python(user, "(KK)", (unsigned long long)done, (unsigned long long)total);
}

// The library may call as long as it likes, so the function stays for good.
static void* kept(PyObject* function) {
  Py_INCREF(function);
  return function;
}
%}

// -------------------------------------------------------------------------------------- structs

%include "offload.h"

%define SIZED(tag)
%extend tag {
  tag() {
    tag##_t* made = calloc(1, sizeof *made);
    if (made != NULL) made->struct_size = sizeof *made;
    return made;
  }
}
%enddef

SIZED(offload_context_options)
SIZED(offload_context_info)
SIZED(offload_comm)
SIZED(offload_message)
SIZED(offload_optimizer_options)
SIZED(offload_group)
SIZED(offload_shard)
SIZED(offload_param)
SIZED(offload_binding)
SIZED(offload_plan)
SIZED(offload_step_options)
SIZED(offload_step_result)
SIZED(offload_move_options)
SIZED(offload_state_view)
SIZED(offload_changes_options)
SIZED(offload_change)
SIZED(offload_changes)
SIZED(offload_stats)
SIZED(offload_save_options)
SIZED(offload_load_options)
SIZED(offload_checkpoint_info)
SIZED(offload_checkpoint_tensor)
SIZED(offload_verify_options)
SIZED(offload_stash_options)
SIZED(offload_stash_plan)
SIZED(offload_stash_stats)
SIZED(offload_exchange_matrix)
SIZED(offload_exchange_options)
SIZED(offload_exchange_plan)

// Arrays for the functions that take several, and for the fields of structs. Elements are copied
// in and out; cast() gives the pointer.
%array_class(offload_param_t, ParamArray);
%array_class(offload_binding_t, BindingArray);
%array_class(uint8_t, Uint8Array);
%array_class(uint32_t, Uint32Array);
%array_class(uint64_t, Uint64Array);
%array_class(int64_t, Int64Array);

// What calls Python, in the structs that have such a field.
%extend offload_context_options {
  // function(level, text); see the field log.
  void set_log(PyObject* function) {
    $self->log = call_log;
    $self->log_user = kept(function);
  }
}

%define WITH_PROGRESS(tag)
%extend tag {
  // function(bytes_done, bytes_total); see the field progress.
  void set_progress(PyObject* function) {
    $self->progress = call_progress;
    $self->progress_user = kept(function);
  }
}
%enddef

WITH_PROGRESS(offload_save_options)
WITH_PROGRESS(offload_load_options)
WITH_PROGRESS(offload_verify_options)

// --------------------------------------------------------------------------------------- errors

%pythoncode %{
class Error(RuntimeError):
    """A status that is not OK, with the text of offload_last_error."""

    def __init__(self, status, text):
        super().__init__(f"{offload_status_name(status)}: {text}")
        self.status = status


def _checked(function):
    def call(*arguments):
        result = function(*arguments)
        status, *values = result if isinstance(result, (list, tuple)) else (result,)
        if status != OFFLOAD_OK:
            raise Error(status, offload_last_error())
        return values[0] if len(values) == 1 else values or None

    call.__name__ = call.__qualname__ = function.__name__
    call.__doc__ = function.__doc__
    return call


# Every function but these four returns a status.
_NO_STATUS = {
    "offload_abi_version",
    "offload_build_info",
    "offload_status_name",
    "offload_last_error",
}
for _name, _value in list(globals().items()):
    if _name.startswith("offload_") and not isinstance(_value, type) and _name not in _NO_STATUS:
        globals()[_name] = _checked(_value)
%}
