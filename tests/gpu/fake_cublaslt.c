/* Stands for a cuBLASLt that the driver refuses, or, if FAKE_CUBLASLT_INCOMPLETE, that lacks
 * functions. */
#include <stddef.h>

int cublasLtCreate(void** handle);
int cublasLtCreate(void** handle) {
  *handle = NULL;
  return 1;
}

#ifndef FAKE_CUBLASLT_INCOMPLETE
#define FUNCTION(name) \
  int name(void);      \
  int name(void) { return 1; }

FUNCTION(cublasLtGetVersion)
FUNCTION(cublasLtDestroy)
FUNCTION(cublasLtMatmulDescCreate)
FUNCTION(cublasLtMatmulDescDestroy)
FUNCTION(cublasLtMatmulDescSetAttribute)
FUNCTION(cublasLtMatrixLayoutCreate)
FUNCTION(cublasLtMatrixLayoutDestroy)
FUNCTION(cublasLtMatmulPreferenceCreate)
FUNCTION(cublasLtMatmulPreferenceDestroy)
FUNCTION(cublasLtMatmulPreferenceSetAttribute)
FUNCTION(cublasLtMatmulAlgoGetHeuristic)
FUNCTION(cublasLtMatmulAlgoConfigGetAttribute)
FUNCTION(cublasLtMatmul)
#endif
