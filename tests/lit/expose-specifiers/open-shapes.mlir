// Sparse operands of open shape come with the sizes of their levels; a sparse result fills a list of addresses and lengths.
// RUN: gossamer-opt %s -p 'expose-storage,sparsification-and-bufferization,expose-specifiers' --split-input-file | filecheck %s

// CHECK-LABEL: func.func @spmv(
// CHECK-SAME:    %[[POS:[a-z0-9]*]]: memref<?xi32>, %[[CRD:[a-z0-9]*]]: memref<?xi32>, %[[VAL:[a-z0-9]*]]: memref<?xf32>,
// CHECK-SAME:    %[[ROWS:[a-z0-9]*]]: index, %[[COLUMNS:[a-z0-9]*]]: index,
// CHECK-SAME:    %{{[a-z0-9]*}}: memref<?xf32>, %{{[a-z0-9]*}}: memref<?xf32>, %{{[a-z0-9]*}}: memref<?xi8>, %{{[a-z0-9]*}}: index)
// CHECK:         %[[S0:.*]] = sparse_tensor.storage_specifier.init
// CHECK:         %[[S1:.*]] = sparse_tensor.storage_specifier.set %[[S0]] lvl_sz at 0 with %[[ROWS]]
// CHECK:         %[[S2:.*]] = sparse_tensor.storage_specifier.set %[[S1]] lvl_sz at 1 with %[[COLUMNS]]
// CHECK:         %[[NPOS:.*]] = memref.dim %[[POS]]
// CHECK:         sparse_tensor.storage_specifier.set %[[S2]] pos_mem_sz at 1 with %[[NPOS]]
// CHECK:         crd_mem_sz at 1
// CHECK:         val_mem_sz with
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed), posWidth = 32, crdWidth = 32}>
func.func @spmv(%a: tensor<?x?xf32, #CSR>, %x: tensor<?xf32>) -> tensor<?xf32> {
  %c0 = arith.constant 0 : index
  %zero = arith.constant 0.0 : f32
  %m = tensor.dim %a, %c0 : tensor<?x?xf32, #CSR>
  %empty = tensor.empty(%m) : tensor<?xf32>
  %start = linalg.fill ins(%zero : f32) outs(%empty : tensor<?xf32>) -> tensor<?xf32>
  %y = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (j)>, affine_map<(i, j) -> (i)>],
                       iterator_types = ["parallel", "reduction"]}
    ins(%a, %x : tensor<?x?xf32, #CSR>, tensor<?xf32>) outs(%start : tensor<?xf32>) {
  ^bb0(%p: f32, %q: f32, %s: f32):
    %0 = arith.mulf %p, %q : f32
    %1 = arith.addf %s, %0 : f32
    linalg.yield %1 : f32
  } -> tensor<?xf32>
  return %y : tensor<?xf32>
}

// -----

// CHECK-LABEL: func.func @negated(
// CHECK-SAME:    %{{[a-z0-9]*}}: index, %{{[a-z0-9]*}}: index, %[[LIST:[a-z0-9]*]]: memref<?xindex>, %{{[a-z0-9]*}}: memref<?xi8>, %{{[a-z0-9]*}}: index) {
// CHECK:         %[[AT:.*]] = memref.extract_aligned_pointer_as_index
// CHECK:         memref.store %[[AT]], %[[LIST]][%c0
// CHECK:         memref.store %{{.*}}, %[[LIST]][%c1
// CHECK:         val_mem_sz
// CHECK:         return{{$}}
#DCSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : compressed, d1 : compressed)}>
func.func @negated(%a: tensor<?x?xf32, #DCSR>) -> tensor<?x?xf32, #DCSR> {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %m = tensor.dim %a, %c0 : tensor<?x?xf32, #DCSR>
  %n = tensor.dim %a, %c1 : tensor<?x?xf32, #DCSR>
  %empty = tensor.empty(%m, %n) : tensor<?x?xf32, #DCSR>
  %y = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, j)>],
                       iterator_types = ["parallel", "parallel"]}
    ins(%a : tensor<?x?xf32, #DCSR>) outs(%empty : tensor<?x?xf32, #DCSR>) {
  ^bb0(%p: f32, %o: f32):
    %0 = arith.negf %p : f32
    linalg.yield %0 : f32
  } -> tensor<?x?xf32, #DCSR>
  return %y : tensor<?x?xf32, #DCSR>
}
