// MLIR's passes: options, nested pipelines, a whole pipeline as one piece, and the optional builtin.module(…) around.
// RUN: gossamer-opt %s -p 'func.func(linalg-generalize-named-ops,cse),canonicalize{region-simplify=aggressive}' | filecheck %s
// RUN: gossamer-opt %s -p 'builtin.module(func.func(linalg-generalize-named-ops), canonicalize)' | filecheck %s
// RUN: gossamer-opt %s -p 'sparsifier{enable-runtime-library=false vl=8}' | filecheck %s --check-prefix=LOOPS

// CHECK-LABEL: func.func @product(
// CHECK-NOT:     linalg.matmul
// CHECK:         linalg.generic
// CHECK-SAME:      iterator_types = ["parallel", "parallel", "reduction"]

// LOOPS-NOT: linalg
// LOOPS:     llvm.func @product(
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @product(%w: tensor<4x8xf32, #CSR>, %x: tensor<8x16xf32>, %y: tensor<4x16xf32>) -> tensor<4x16xf32> {
  %0 = linalg.matmul ins(%w, %x : tensor<4x8xf32, #CSR>, tensor<8x16xf32>) outs(%y : tensor<4x16xf32>) -> tensor<4x16xf32>
  return %0 : tensor<4x16xf32>
}
