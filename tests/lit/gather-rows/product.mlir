// CSR of any size times dense becomes kernel.gather_rows; all else is refused.
// RUN: gossamer-opt %s -p 'func.func(linalg-generalize-named-ops),linalg-fuse-elementwise-ops,gather-rows{bits=256}' --split-input-file --verify-diagnostics | filecheck %s

// CHECK-LABEL: func.func @spmm(
// CHECK-NOT:     linalg
// CHECK:         %[[Y:.*]] = "kernel.gather_rows"(%{{.*}}, %{{.*}}) {lanes = 8 : i64, vectors = 8 : i64}
// CHECK:         return %[[Y]]
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @spmm(%a: tensor<?x?xf32, #CSR>, %x: tensor<?x?xf32>, %m: index, %n: index) -> tensor<?x?xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty(%m, %n) : tensor<?x?xf32>
  %start = linalg.fill ins(%zero : f32) outs(%empty : tensor<?x?xf32>) -> tensor<?x?xf32>
  %y = linalg.matmul ins(%a, %x : tensor<?x?xf32, #CSR>, tensor<?x?xf32>) outs(%start : tensor<?x?xf32>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}

// -----

// By columns.
#CSC = #sparse_tensor.encoding<{map = (d0, d1) -> (d1 : dense, d0 : compressed)}>
func.func @csc(%a: tensor<?x?xf32, #CSC>, %x: tensor<?x?xf32>, %m: index, %n: index) -> tensor<?x?xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty(%m, %n) : tensor<?x?xf32>
  %start = linalg.fill ins(%zero : f32) outs(%empty : tensor<?x?xf32>) -> tensor<?x?xf32>
  // expected-error @unknown {{the rows schedule computes CSR x dense, not linalg.generic}}
  %y = linalg.matmul ins(%a, %x : tensor<?x?xf32, #CSC>, tensor<?x?xf32>) outs(%start : tensor<?x?xf32>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}

// -----

// Narrow floats are summed in f32 and rounded at the end; a vector is one column.
// CHECK-LABEL: func.func @spmv(
// CHECK-NOT:     linalg
// CHECK:         "kernel.gather_rows"(%{{.*}}, %{{.*}}) {lanes = 8 : i64, vectors = 8 : i64} : {{.*}} -> tensor<?xbf16>
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#product = {indexing_maps = [affine_map<(i, k) -> (i, k)>, affine_map<(i, k) -> (k)>, affine_map<(i, k) -> (i)>], iterator_types = ["parallel", "reduction"]}
#each = {indexing_maps = [affine_map<(i) -> (i)>, affine_map<(i) -> (i)>], iterator_types = ["parallel"]}
func.func @spmv(%a: tensor<?x?xbf16, #CSR>, %x: tensor<?xbf16>, %m: index) -> tensor<?xbf16> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty(%m) : tensor<?xf32>
  %start = linalg.fill ins(%zero : f32) outs(%empty : tensor<?xf32>) -> tensor<?xf32>
  %sums = linalg.generic #product ins(%a, %x : tensor<?x?xbf16, #CSR>, tensor<?xbf16>) outs(%start : tensor<?xf32>) {
  ^bb0(%v: bf16, %e: bf16, %sum: f32):
    %0 = arith.extf %v : bf16 to f32
    %1 = arith.extf %e : bf16 to f32
    %2 = arith.mulf %0, %1 : f32
    %3 = arith.addf %sum, %2 : f32
    linalg.yield %3 : f32
  } -> tensor<?xf32>
  %narrow = tensor.empty(%m) : tensor<?xbf16>
  %y = linalg.generic #each ins(%sums : tensor<?xf32>) outs(%narrow : tensor<?xbf16>) {
  ^bb0(%sum: f32, %old: bf16):
    %0 = arith.truncf %sum : f32 to bf16
    linalg.yield %0 : bf16
  } -> tensor<?xbf16>
  return %y : tensor<?xbf16>
}
