# examples_cublas: cuBLAS, for the products of the examples on a GPU. The library needs none; where
# there is none the examples are built without their parts for a GPU.
set(HYBRIDOPT_CUBLAS_ROOT "" CACHE PATH
  "Where cuBLAS is unless in the CUDA toolkit: the folder that holds include/cublas_v2.h and lib/libcublas.so*, such as nvidia/cu13 of NVIDIA's Python packages")

if(NOT HYBRIDOPT_HAS_CUDA)
  return()
endif()
if(HYBRIDOPT_CUBLAS_ROOT)
  # The Python packages have no libcublas.so, only one with a version.
  file(GLOB cublas ${HYBRIDOPT_CUBLAS_ROOT}/lib/libcublas.so* ${HYBRIDOPT_CUBLAS_ROOT}/lib64/libcublas.so*)
  set(cublas_include ${HYBRIDOPT_CUBLAS_ROOT}/include)
  if(NOT cublas OR NOT EXISTS ${cublas_include}/cublas_v2.h)
    message(FATAL_ERROR "HYBRIDOPT_CUBLAS_ROOT is ${HYBRIDOPT_CUBLAS_ROOT}, expected a folder that "
      "holds include/cublas_v2.h and lib/libcublas.so*")
  endif()
  list(GET cublas 0 cublas)
elseif(TARGET CUDA::cublas)
  set(cublas CUDA::cublas)
  set(cublas_include ${CUDAToolkit_INCLUDE_DIRS})
else()
  message(STATUS "Examples 03_rl_cycle and 04_train_lm: not for a GPU, as the CUDA toolkit has no "
    "cuBLAS; -DHYBRIDOPT_CUBLAS_ROOT=FOLDER names another one (FOLDER/include/cublas_v2.h)")
  return()
endif()
message(STATUS "Examples 03_rl_cycle and 04_train_lm: for a GPU too, with ${cublas}")

add_library(examples_cublas INTERFACE)
target_include_directories(examples_cublas SYSTEM INTERFACE
  ${CUDAToolkit_INCLUDE_DIRS} ${cublas_include})
target_compile_definitions(examples_cublas INTERFACE HYBRIDOPT_EXAMPLES_CUBLAS)
target_link_libraries(examples_cublas INTERFACE ${cublas} CUDA::cudart_static)
