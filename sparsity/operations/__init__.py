"""Operations on SparseTensors as torch sees them: shapes, gradients, batches."""
